"""A few rows of tokens times a matrix, on a CPU.

The library multiplies one row on one core, and a few rows on little more. Cut into as many pieces as there are threads,
the matrix is a batch of smaller ones, which keeps all cores reading: two are 1.2 to 2 times as fast with up to 32 rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 32
SMALLEST = 2**16
"""Numbers in a matrix that is worth the cutting."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`, to rounding."""
    pieces = _pieces(x, weight)
    if pieces < 2:
        return F.linear(x, weight, bias)
    out, width = weight.shape
    rows = x.reshape(1, -1, width)
    parts = torch.bmm(rows.expand(pieces, -1, -1), weight.view(pieces, out // pieces, width).transpose(1, 2))
    found = parts.transpose(0, 1).reshape(*x.shape[:-1], out)
    return found if bias is None else found + bias


def _pieces(x: Tensor, weight: Tensor) -> int:
    """How many to cut the matrix into; 1 where the library is to have it whole."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu":
        return 1
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return 1
    if weight.numel() < SMALLEST or not weight.is_contiguous():
        return 1
    rows = x.numel() // x.shape[-1]
    if isinstance(rows, torch.SymInt) or not 1 <= rows <= MOST_ROWS:  # a shape without a number has no few rows
        return 1
    threads = torch.get_num_threads()
    return threads if len(weight) % threads == 0 else 1
