"""A layer norm and the projection of what it returns, both wanted: active rows need the normalised state too."""

from torch import Tensor

from tokendepth.ops.backend import serves

__all__ = ["norm_linear"]

LARGEST_D = 256
"""Up to this d, a power of two, a row fits in one tile and the kernel saves a pass over it."""


def norm_linear(h: Tensor, norm: Tensor, norm_bias: Tensor, w: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """h: `[..., d]`. norm, norm_bias: `[d]`. w: `[out, d]`. Returns the norm of h, and its product with w `[..., out]`.

    `auto` is the kernel for low precision on a GPU where no gradient is wanted, and `eager` otherwise.
    """
    if backend == "auto":
        d = h.shape[-1]
        backend = "kernel" if 16 <= d <= LARGEST_D and d & (d - 1) == 0 and serves(h) else "eager"
    if backend == "kernel":
        from tokendepth.ops.norm_linear.kernel import kernel as run
    elif backend == "eager":
        from tokendepth.ops.norm_linear.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.norm_linear.reference import reference as run
    else:
        raise ValueError(f"unknown backend {backend!r}: not one of auto, reference, eager, kernel")
    return run(h, norm, norm_bias, w)
