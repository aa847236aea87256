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


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """To be called by every program before it reads or writes what another kernel writes or reads."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """To be called when a program is nearly done, else the next kernel's programs crowd where there is room by now."""
    if OVERLAP:
        gdc_launch_dependents()


def overlapped(x: Tensor) -> dict[str, bool]:
    """What a launch on x's device is given: the flag for `after_previous`, and the option that makes it work."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
