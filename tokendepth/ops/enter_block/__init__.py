"""What a block needs of every token before any is skipped: its norm, its key and value, and what the router says.

Active rows need the norm too. All three read the same states, so that one pass over them is enough.
"""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.backend import compiles_inference, fits_one_tile, serves

__all__ = ["Entered", "RouterWeights", "enter_block"]


class RouterWeights(NamedTuple):
    """As `halting_logits` takes them; `normed`: it reads the state at mean 0 and variance 1, else the state itself."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    normed: bool = False


class Entered(NamedTuple):
    x: Tensor
    """What the first norm makes of the state, `[..., d]`."""
    both: Tensor
    """Keys and values side by side, `[..., 2 d]`."""
    logit: Tensor
    """What the router says, `[...]` in float32; empty where there is no router."""


def enter_block(
    h: Tensor,
    norm: Tensor,
    norm_bias: Tensor,
    w_kv: Tensor,
    router: RouterWeights | None = None,
    backend: str = "auto",
) -> Entered:
    """h: `[..., d]`. norm, norm_bias: `[d]`. w_kv: `[2 d, d]`.

    `auto` is the kernel for low precision on a GPU where no gradient is wanted, `joined` where a compiler packs the
    weights (`compiled.py`), and `eager` otherwise.
    """
    if backend == "auto":
        if fits_one_tile(h.shape[-1]) and serves(h):
            backend = "kernel"
        else:
            packed = compiles_inference() and not h.is_cuda
            backend = "joined" if router is not None and packed else "eager"
    if backend == "kernel":
        from tokendepth.ops.enter_block.kernel import kernel as run
    elif backend == "joined":
        from tokendepth.ops.enter_block.joined import joined as run
    elif backend == "eager":
        from tokendepth.ops.enter_block.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.enter_block.reference import reference as run
    else:
        raise ValueError(f"unknown backend {backend!r}: not one of auto, reference, eager, joined, kernel")
    return Entered(*run(h, norm, norm_bias, w_kv, router))
