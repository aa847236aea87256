import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.few_rows.eager import linear
from tokendepth.ops.router import halting_logits


def eager(h: Tensor, norm, w_kv: Tensor, b_kv: Tensor | None, router) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `reference`, with library calls."""
    x = normalised(h, norm.scale, norm.shift, norm.eps, rms=norm.shift is None)
    logit = None
    if router is not None:
        states = normalised(h, None, None, norm.eps, rms=norm.shift is None) if router.normed else h
        logit = halting_logits(states, *router[:4], low_precision=torch.is_autocast_enabled(h.device.type))
    return x, linear(x, w_kv, b_kv), logit


def normalised(h: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, *, rms: bool) -> Tensor:
    if rms:  # in the precision of h: under autocast the weight has a different one
        return F.rms_norm(h, h.shape[-1:], None if scale is None else scale.to(h.dtype), eps)
    return F.layer_norm(h, h.shape[-1:], scale, shift, eps)
