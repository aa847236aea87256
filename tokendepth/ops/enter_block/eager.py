import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.router import halting_logits


def eager(h: Tensor, norm: Tensor, norm_bias: Tensor, w_kv: Tensor, router=None) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`, by library calls."""
    x = F.layer_norm(h, h.shape[-1:], norm, norm_bias)
    logit = h.new_empty(0, dtype=torch.float32)
    if router is not None:
        states = F.layer_norm(h, h.shape[-1:]) if router.normed else h
        logit = halting_logits(states, *router[:4], low_precision=torch.is_autocast_enabled(h.device.type))
    return x, F.linear(x, w_kv), logit
