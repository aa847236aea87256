import torch
from torch import Tensor

from tokendepth.ops.router.reference import reference as halting_logits


def reference(h: Tensor, norm: Tensor, norm_bias: Tensor, w_kv: Tensor, router=None) -> tuple[Tensor, Tensor, Tensor]:
    """The norm written out: mean 0 and variance 1, scaled and shifted."""
    centred = h - h.mean(-1, keepdim=True)
    plain = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    x = plain * norm + norm_bias
    logit = (
        h.new_empty(0, dtype=torch.float32)
        if router is None
        else halting_logits(plain if router.normed else h, *router[:4])
    )
    return x, x @ w_kv.T, logit
