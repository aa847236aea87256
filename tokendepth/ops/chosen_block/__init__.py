"""`choose`, and `active_block` for those who were chosen; with few tokens in short sequences, one kernel less.

At a few thousand tokens a kernel costs 2 us to be there at all, which is more than it takes every program of the next
one to decide for its sequence itself.
"""

from torch import Tensor

from tokendepth.ops.active_block import BlockWeights, active_block, fits_tiles
from tokendepth.ops.backend import FEW_TOKENS, fits_one_tile, serves
from tokendepth.ops.choose import choose

__all__ = ["chosen_block", "everybodys_block", "saves_kernels"]

SHORT = 256
"""Of a sequence no longer than that, a program finds its own rows without writing the list first."""


def chosen_block(
    h: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    logit: Tensor,
    threshold: Tensor | float,
    weights: BlockWeights,
    halt: Tensor | None = None,
    valid: Tensor | None = None,
    key_valid: Tensor | None = None,
    *,
    inclusive: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Logit, threshold, valid and inclusive as of `choose`, the rest as of `active_block`. Returns h and who is active.

    `auto` is one kernel less where kernels serve and there are few tokens, else what both ops choose.
    """
    if (backend == "kernel" and _decides_itself(h)) or (backend == "auto" and saves_kernels(h, weights, k.shape[1])):
        from tokendepth.ops.active_block.kernel import choosing_kernel

        return choosing_kernel(h, x, k, v, logit, threshold, weights, halt, valid, key_valid, inclusive)
    active, listed = choose(logit, threshold, valid, inclusive=inclusive, states=h, backend=backend)
    return active_block(h, x, k, v, active, weights, halt, key_valid, listed, backend), active


def everybodys_block(
    h: Tensor, x: Tensor, k: Tensor, v: Tensor, weights: BlockWeights, key_valid: Tensor | None = None
) -> Tensor:
    """The same kernels for all tokens, with nothing to decide: faster than the library where `saves_kernels`."""
    from tokendepth.ops.active_block.kernel import choosing_kernel

    return choosing_kernel(h, x, k, v, None, 0.0, weights, None, None, key_valid, False)[0]


def saves_kernels(h: Tensor, weights: BlockWeights, heads: int) -> bool:
    """Whether a block of this shape is so small that launches decide how long it takes."""
    # Whether kernels serve is asked first: a compiler need not know sizes where they do not.
    return serves(h) and h.shape[0] * h.shape[1] <= FEW_TOKENS and _decides_itself(h) and fits_tiles(weights, heads)


def _decides_itself(h: Tensor) -> bool:
    return h.shape[1] <= SHORT and fits_one_tile(h.shape[-1])
