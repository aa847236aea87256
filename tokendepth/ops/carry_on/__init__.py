"""A linear recurrence over tokens: `c_t = fresh_t + keep_t c_{t-1}`."""

import torch
from torch import Tensor

from tokendepth.ops.carry_on.eager import eager
from tokendepth.ops.carry_on.packed import carry_rows
from tokendepth.ops.launch import has_triton, unknown_backend

__all__ = ["carry_on", "carry_rows"]


def carry_on(fresh: Tensor, keep: Tensor, before: Tensor | None = None, backend: str = "auto") -> Tensor:
    """fresh: `[batch, time, d]`. keep: `[batch, time]`, numbers or decisions. before: `[batch, d]`, c_0; None: 0.

    `auto` is the kernel on a GPU, and `eager` otherwise and for a single token. The kernel sums in float32 and has no
    gradient for `before`.
    """
    if backend == "auto":
        exact = fresh.dtype == torch.float64 or (before is not None and before.requires_grad)
        backend = "kernel" if fresh.is_cuda and fresh.shape[1] > 1 and has_triton() and not exact else "eager"
    if backend == "kernel":
        from tokendepth.ops.carry_on.kernel import kernel as run
    elif backend == "eager":
        run = eager
    elif backend == "reference":
        from tokendepth.ops.carry_on.reference import reference as run
    else:
        raise unknown_backend(backend)
    return run(fresh, keep, before)
