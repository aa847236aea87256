"""Kernels that begin while the one before them ends.

At a few thousand tokens a kernel takes 2 to 7 us, of which 1 to 2 go by between the last program of one kernel and the
first of the next. From compute capability 9.0 on, the next one's programs can be there already and wait.
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
    """To be called by every program before it reads or writes what another kernel writes or reads."""
    if OVERLAP != 0:
        gdc_wait()
    if OVERLAP == 1:
        gdc_launch_dependents()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """To be called when a program is nearly done."""
    if OVERLAP == 2:
        gdc_launch_dependents()


def overlapped(x: Tensor) -> dict[str, int | bool]:
    """What a launch for states x `[..., d]` is given: when to let the next begin, and the option that makes it work."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return {"OVERLAP": NOT_AT_ALL}
    # Few leave room on some multiprocessors, where the next kernel's programs would crowd if they were let in early.
    few = x.numel() // x.shape[-1] <= FEW_TOKENS
    return {"OVERLAP": WHEN_NEARLY_DONE if few else FROM_THE_START, "launch_pdl": True}
