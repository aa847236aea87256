"""Which inputs kernels support and how they are launched; each op chooses between its variants."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)
FEW_TOKENS = 4096
"""Up to this many rows do not fill a GPU. Kernels then use smaller tiles, so that every multiprocessor gets one."""

LARGEST_TILE = 256
"""Up to this d (a power of two) a row fits in one tile, which saves passes over it."""

NARROWEST_HEAD = 16
"""Heads of width 8, padded to the 16 that tensor cores need, give wrong results on an H200 (Triton 3.6)."""


def fits_one_tile(d: int) -> bool:
    return 16 <= d <= LARGEST_TILE and d & (d - 1) == 0


def serves(h: Tensor) -> bool:
    """Whether kernels without a gradient support `h`; in float32 the library's products are faster."""
    nvidia = h.is_cuda and torch.version.hip is None
    return nvidia and h.dtype in LOW_PRECISION and not torch.is_grad_enabled() and has_triton()


def check_kernel(h: Tensor, width: int = NARROWEST_HEAD) -> None:
    if width < NARROWEST_HEAD:
        raise ValueError(f"backend 'kernel' is for heads of width {NARROWEST_HEAD} or more, not {width}; use 'eager'")
    if h.is_cuda and h.dtype not in LOW_PRECISION:
        raise ValueError(f"backend 'kernel' is for bfloat16 and float16 on a GPU, not {h.dtype}; use 'eager'")


def unknown_backend(name: str, known: tuple[str, ...] = ("auto", "reference", "eager", "kernel")) -> ValueError:
    return ValueError(f"unknown backend {name!r}: not one of {', '.join(known)}")


def has_triton() -> bool:
    return _find_triton()


@cache
def _find_triton() -> bool:
    return find_spec("triton") is not None


# As torch.compiler.assume_constant_result, but without importing dynamo, which can trace neither functools.cache nor,
# in torch 2.11, find_spec.
vars(has_triton)["_dynamo_marked_constant"] = True


def compiles_inference() -> bool:
    """Whether torch.compile is tracing without a gradient: only then may ops be opaque and weights constant."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()
