"""The router in eq. 2, before the sigmoid: `w2 . relu(w1 h + b1) + b2`, the halting logit of every token."""

import torch
from torch import Tensor

from tokendepth.ops.launch import has_triton, unknown_backend
from tokendepth.ops.router.eager import eager
from tokendepth.ops.router.reference import reference

__all__ = ["halting_logits"]

# Up to these sizes `auto` uses the kernel. Above them its tiles of w1 no longer fit in registers and its backward
# repeats the forward several times, while the library's products are large enough to be fast.
LARGEST_HIDDEN = 128
LARGEST_D = 512


def halting_logits(
    h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, low_precision: bool = False, backend: str = "auto"
) -> Tensor:
    """h: `[..., d]`, float32 or bfloat16. w1: `[hidden, d]`, b1: `[hidden]`, w2: `[1, hidden]`, b2: `[1]`, float32.

    Returns `[...]` in float32. `low_precision`: bfloat16 operands in the products, summed in float32.
    `auto` is the kernel for low precision on a GPU, up to the sizes above, and `eager` otherwise, because in full
    float32 the library is faster. A model in bfloat16 has all its weights in bfloat16 and no gradient.
    """
    low_precision = low_precision or (w1.dtype == torch.bfloat16 and not torch.is_grad_enabled())
    if backend == "auto":
        small = w1.shape[0] <= LARGEST_HIDDEN and w1.shape[1] <= LARGEST_D
        backend = "kernel" if h.is_cuda and low_precision and small and has_triton() else "eager"
    if backend == "kernel":
        from tokendepth.ops.router.kernel import kernel

        return kernel(h, w1, b1, w2, b2, low_precision)
    if backend == "eager":
        return eager(h, w1, b1, w2, b2, low_precision)
    if backend == "reference":
        return reference(h, w1, b1, w2, b2, low_precision)
    raise unknown_backend(backend)
