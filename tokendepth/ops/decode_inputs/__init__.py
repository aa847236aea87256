"""`block_inputs` for a decoding step, one new token per cache slot: norm, key and value, and the router's decision.

Keys and values are written to the cache. The rest of the block is `decode_block`.
"""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs, NormWeights, RouterWeights, Threshold
from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.sparse_block import Rotation

__all__ = ["CacheLayer", "KeyWeights", "Unwritten", "decode_inputs"]

FEW_ROWS = 1
"""Up to this many slots, this kernel computes keys and values, and one more kernel the rest of the block; for more,
`decode_many` is faster. Time per block: 18 against 30 us for one slot, 50 against 37 for two (H200, d 1,024, 0.4
active)."""


class KeyWeights(NamedTuple):
    """Projection of keys and values: the rows of the keys, then those of the values."""

    heads: int
    weight: Tensor
    """`[2 x heads x width, d]`"""
    bias: Tensor | None = None
    norm: Tensor | None = None
    """The scale of an RMSNorm of each head's key."""
    eps: float = 0.0
    joined: Tensor | None = None
    """The rows of the queries, then those of `weight`, so that one product computes all."""


class CacheLayer(NamedTuple):
    """One layer of a cache."""

    keys: Tensor
    """`[slot, kv head, column, width]`, like the values."""
    values: Tensor
    seen: Tensor
    """`[slot, column]`, False for keys that must not be attended to."""
    window: int
    """Columns that may be attended to."""


class Unwritten(NamedTuple):
    """Keys and values for many slots, which `decode_block` computes in one product with the queries."""

    keys: KeyWeights
    writes: Tensor
    """`[slot, 1]`: the columns to write to."""
    among: Tensor | None
    """`[slot, 1]`: the tokens whose keys and values are computed; None: all."""


def decode_inputs(
    h: Tensor,
    norm: NormWeights,
    keys: KeyWeights,
    layer: CacheLayer,
    writes: Tensor,
    rotation: Rotation | None = None,
    leaving: Tensor | None = None,
    active: Tensor | None = None,
    router: RouterWeights | None = None,
    threshold: Threshold | None = None,
    backend: str = "auto",
) -> BlockInputs:
    """h: `[slots, 1, d]`. Writes keys and values to the columns `writes` `[slots, 1]` of `layer` and returns the rest.

    leaving: `[slots, 1]`, the tokens whose keys others may attend to; None: all. active: `[slots, 1]`, the tokens whose
    norm, key and value are computed at all; None: all. A router needs the threshold of its decision. For more than a
    few slots, the kernel defers keys and values to `decode_block`, to which the returned `unwritten` must be passed.
    """
    assert (router is None) == (threshold is None), "a router decides by a threshold"
    if backend == "auto":
        backend = "kernel" if serves(h) else "eager"
    if backend == "kernel":
        from tokendepth.ops.decode_inputs import kernel

        run = kernel.without_keys if len(h) > FEW_ROWS and keys.joined is not None else kernel.kernel
    elif backend == "eager":
        from tokendepth.ops.decode_inputs.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.decode_inputs.reference import reference as run
    else:
        raise unknown_backend(backend)
    return run(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold)
