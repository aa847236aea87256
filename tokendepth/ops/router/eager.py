import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.few_rows.eager import linear


def eager(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, low_precision: bool = False) -> Tensor:
    """As `reference`, with two library products. `low_precision` is as in autocast: results are rounded, too."""
    dtype = torch.bfloat16 if low_precision else w1.dtype
    with torch.autocast(h.device.type, enabled=False):  # the argument decides, not an outer autocast
        hidden = torch.relu(linear(h.to(dtype), w1.to(dtype), b1.to(dtype)))
        return F.linear(hidden, w2.to(dtype), b2.to(dtype)).squeeze(-1).to(torch.promote_types(w1.dtype, torch.float32))
