import torch.nn.functional as F
from torch import Tensor


def eager(h: Tensor, norm: Tensor, norm_bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference`, two library calls."""
    x = F.layer_norm(h, h.shape[-1:], norm, norm_bias)
    return x, F.linear(x, w)
