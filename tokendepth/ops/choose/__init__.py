"""Who is active, decided by the routers' logits, and where kernels work, the list of them."""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.backend import serves

__all__ = ["Chosen", "Listed", "choose"]


class Listed(NamedTuple):
    """The active tokens of all sequences, one sequence after the other; their number is known on the device only."""

    places: Tensor
    """Where they are in `batch x time`, int32; as long as if all were active."""
    starts: Tensor
    """`[batch + 1]`, int32: where each sequence's begin, and their number."""


class Chosen(NamedTuple):
    active: Tensor
    """`[batch, time]`, bool."""
    listed: Listed | None
    """Where a kernel made it."""


def choose(
    logit: Tensor,
    threshold: Tensor | float,
    valid: Tensor | None = None,
    *,
    inclusive: bool = False,
    states: Tensor | None = None,
    backend: str = "auto",
) -> Chosen:
    """A token is active whose score, `-logit`, is above the threshold (`inclusive`: or at it), and which is `valid`.

    logit: `[batch, time]`. threshold: a number, or a tensor of one or of one a token. `auto` is the kernel where
    kernels serve the `states` that are decided about, and `eager` otherwise.
    """
    if backend == "auto":
        backend = "kernel" if states is not None and serves(states) else "eager"
    if backend == "kernel":
        from tokendepth.ops.choose.kernel import kernel as run
    elif backend == "eager":
        from tokendepth.ops.choose.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.choose.reference import reference as run
    else:
        raise ValueError(f"unknown backend {backend!r}: not one of auto, reference, eager, kernel")
    active, listed = run(logit, threshold, valid, inclusive)
    return Chosen(active, listed and Listed(*listed))
