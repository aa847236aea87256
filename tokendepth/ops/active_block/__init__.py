"""A block for its active tokens: query, attention row, output projection and feed-forward; the others pass unchanged.

Keys and values are there already, for every token. Inference alone: it has no gradient where the kernel runs.
"""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.backend import NARROWEST_HEAD, serves
from tokendepth.ops.choose import Listed

__all__ = ["BlockWeights", "active_block", "fits_tiles"]

TILE = 64
"""Widths that are no multiples of it are the library's: they gain nothing by kernels."""


class BlockWeights(NamedTuple):
    """Of one block, each `[out, in]`; the projection of keys and values is not among them."""

    query: Tensor
    out: Tensor
    norm: Tensor
    norm_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


def fits_tiles(weights: BlockWeights, heads: int) -> bool:
    ff, d = weights.up.shape
    return d % TILE == ff % TILE == 0 and d // heads >= NARROWEST_HEAD


def active_block(
    h: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor,
    weights: BlockWeights,
    halt: Tensor | None = None,
    key_valid: Tensor | None = None,
    listed: Listed | None = None,
    backend: str = "auto",
) -> Tensor:
    """h, x: `[batch, time, d]`, the state and what the first norm made of it. k, v: `[batch, head, keys, width]`.

    active: `[batch, time]` bool; its columns are the last `time` of the keys. listed: what `choose` found out about it.
    halt: `[batch, time]`; an active token keeps `sigmoid(-halt)` of its updates, all of them where it is not given.
    key_valid: `[batch, keys]`, False where a key must not be seen (a token always sees its own). Returns h with the
    active rows replaced, without a gradient in h itself: it is the caller's to give away. The kernel asks nothing of
    the host: counts stay on the device, so it can be captured in a graph.
    """
    if backend == "auto":
        backend = "kernel" if fits_tiles(weights, k.shape[1]) and serves(h) else "eager"
    if backend == "kernel":
        from tokendepth.ops.active_block.kernel import kernel as run
    elif backend == "eager":
        from tokendepth.ops.active_block.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.active_block.reference import reference as run
    else:
        raise ValueError(f"unknown backend {backend!r}: not one of auto, reference, eager, kernel")
    return run(h, x, k, v, active, weights, halt, key_valid, listed)
