"""Kernels that start while the previous one ends (programmatic dependent launch).

At a few thousand tokens a kernel takes 2 to 7 us, of which 1 to 2 pass between the last program of one kernel and the
first of the next. From compute capability 9.0 on, the next kernel's programs can already be resident and waiting.
"""

# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokendepth.ops.launch import FEW_TOKENS

NOT_AT_ALL, FROM_THE_START, WHEN_NEARLY_DONE = 0, 1, 2


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Call in every program before it touches memory that another kernel reads or writes."""
    if OVERLAP != 0:
        gdc_wait()
    if OVERLAP == 1:
        gdc_launch_dependents()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Call when a program is nearly done."""
    if OVERLAP == 2:
        gdc_launch_dependents()


def overlapped(x: Tensor) -> dict[str, int | bool]:
    """Launch arguments for states x `[..., d]`: whether to let the next kernel start early, and the option for it."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": NOT_AT_ALL}
    # With few programs some multiprocessors are idle; the next kernel's programs would crowd there if started early.
    few = x.numel() // x.shape[-1] <= FEW_TOKENS
    return {"OVERLAP": WHEN_NEARLY_DONE if few else FROM_THE_START, "launch_pdl": True}
