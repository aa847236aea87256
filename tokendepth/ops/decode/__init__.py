"""One more token for each slot of a cache: a block that streams the weights of what is active, and no others.

Two steps. `decode_inputs`: norm, key and value, written to the cache, and the router's decision. `decode_block`: query,
attention row, output projection and feed-forward of the active tokens. A decoding step is as long as its weights take
to arrive from memory, so a kernel whose tokens are all halted returns before it has loaded any. On a CPU, for one
sequence, the host looks at the decision and calls nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs, NormWeights, RouterWeights, Threshold
from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.sparse_block import BlockWeights, Rotation, has_kernel

__all__ = ["CacheLayer", "KeyWeights", "decode_block", "decode_inputs", "runs_eager", "runs_kernel"]

MOST_ROWS = 128
"""More tokens than this are computed as a prompt is."""


class KeyWeights(NamedTuple):
    """Of keys and values: the keys' rows, then those of the values."""

    heads: int
    weight: Tensor
    """`[2 x heads x width, d]`"""
    bias: Tensor | None = None
    norm: Tensor | None = None
    """The scale of an RMSNorm of each head's key."""
    eps: float = 0.0


class CacheLayer(NamedTuple):
    """One layer of a cache."""

    keys: Tensor
    """`[slot, kv head, column, width]`, as are the values."""
    values: Tensor
    seen: Tensor
    """`[slot, column]`, False where a key must not be seen."""
    window: int
    """Columns that may be attended to."""


def runs_kernel(h: Tensor, weights: BlockWeights | None) -> bool:
    """Whether kernels, without host synchronisation, decode one token `h` `[slots, 1, d]` of each slot."""
    return h.shape[1] == 1 and len(h) <= MOST_ROWS and has_kernel(weights) and serves(h)


def runs_eager(h: Tensor) -> bool:
    """Whether `h` `[slots, 1, d]` is one token alone on a CPU, of which nothing is compiled or learned."""
    alone = h.shape[:2] == (1, 1) and h.device.type == "cpu"
    return alone and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _auto(h: Tensor) -> str:
    return "kernel" if h.is_cuda else "eager"


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
    are computed at all; None: everybody's. A router comes with the threshold of its decision.
    """
    assert (router is None) == (threshold is None), "a router decides by a threshold"
    backend = _auto(h) if backend == "auto" else backend
    if backend == "kernel":
        from tokendepth.ops.decode.kernel import inputs as run
    elif backend == "eager":
        from tokendepth.ops.decode.eager import inputs as run
    elif backend == "reference":
        from tokendepth.ops.decode.reference import inputs as run
    else:
        raise unknown_backend(backend)
    return run(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold)


def decode_block(
    h: Tensor,
    x: Tensor,
    layer: CacheLayer,
    columns: Tensor,
    active: Tensor | None,
    weights: BlockWeights,
    gate: Tensor | None = None,
    rotation: Rotation | None = None,
    backend: str = "auto",
) -> Tensor:
    """h, x: `[slots, 1, d]`, the state and what the first norm made of it; columns: `[slots, 1]`, its own column.

    active: `[slots, 1]` bool, None for all; gate: `[slots, 1]`, scales an active token's updates. A token always sees
    its own key. Returns h with the active rows replaced; it may overwrite h.
    """
    backend = _auto(h) if backend == "auto" else backend
    if backend == "kernel":
        from tokendepth.ops.decode.kernel import block as run
    elif backend == "eager":
        from tokendepth.ops.decode.eager import block as run
    elif backend == "reference":
        from tokendepth.ops.decode.reference import block as run
    else:
        raise unknown_backend(backend)
    return run(h, x, layer, columns, active, weights, gate, rotation)
