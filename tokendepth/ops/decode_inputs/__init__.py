"""Of one more token for each slot of a cache: norm, key and value, written to the cache, and the router's decision.

As `block_inputs`, which has no cache. The rest of the block is `decode_block`.
"""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs, NormWeights, RouterWeights, Threshold
from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.sparse_block import Rotation

__all__ = ["CacheLayer", "KeyWeights", "Unwritten", "decode_inputs"]

FEW_ROWS = 1
"""Up to so many slots this kernel makes keys and values, and another does the whole block; for more, `decode_many` is
faster: 18 and 30 us a block for one slot, 50 and 37 for two (H200, d 1,024, 0.4 active)."""


class KeyWeights(NamedTuple):
    """Of keys and values: the keys' rows, then those of the values."""

    heads: int
    weight: Tensor
    """`[2 x heads x width, d]`"""
    bias: Tensor | None = None
    norm: Tensor | None = None
    """The scale of an RMSNorm of each head's key."""
    eps: float = 0.0
    joined: Tensor | None = None
    """The rows of the queries, then those of `weight`: one product makes all of them."""


class CacheLayer(NamedTuple):
    """One layer of a cache."""

    keys: Tensor
    """`[slot, kv head, column, width]`, as are the values."""
    values: Tensor
    seen: Tensor
    """`[slot, column]`, False where a key must not be seen."""
    window: int
    """Columns that may be attended to."""


class Unwritten(NamedTuple):
    """Keys and values of many slots, which `decode_block` makes in one product with the queries."""

    keys: KeyWeights
    writes: Tensor
    """`[slot, 1]`, columns."""
    among: Tensor | None
    """`[slot, 1]`, whose are made; None: everybody's."""


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
    """h: `[slots, 1, d]`. Writes keys and values to the columns `writes` `[slots, 1]` of `layer`, and returns the rest.

    leaving: `[slots, 1]`, whose key others may see; None: everybody's. active: `[slots, 1]`, whose key, value and norm
    are computed at all; None: everybody's. A router comes with the threshold of its decision. Of more than a few slots
    the kernel leaves keys and values to `decode_block`, which has to be given what is `unwritten`.
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
