import torch
import torch.nn.functional as F
from torch import Tensor


def joined(h: Tensor, norm, w_kv: Tensor, b_kv: Tensor | None, router) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`, with keys, values and the router's hidden layer in one product over the normalised state.

    The norm's scale and shift are folded into the weights. If the router reads the raw state (the normalised one times
    its deviation plus its mean), both are restored afterwards. Meant for torch.compile with constant weights, where
    folding happens once.
    """
    if norm.shift is None:
        exact = h.to(torch.promote_types(h.dtype, torch.float32))
        reciprocal, mean = torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm.eps), 0.0
        plain, bias = (exact * reciprocal).to(h.dtype), h.new_zeros(len(w_kv))
    else:
        plain, mean, reciprocal = torch.native_layer_norm(h, h.shape[-1:], None, None, norm.eps)
        bias = w_kv @ norm.shift
    bias = bias if b_kv is None else bias + b_kv
    weights = torch.cat([w_kv * norm.scale, router.w1])
    product = F.linear(plain, weights, torch.cat([bias, torch.zeros_like(router.b1)]))
    kv, hidden = product.split([len(w_kv), len(router.w1)], dim=-1)
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if not router.normed:
        hidden = hidden / reciprocal + mean * router.w1.sum(1)
    logit = (torch.relu(hidden + router.b1) * router.w2).sum(-1) + router.b2
    x = plain * norm.scale
    return x if norm.shift is None else x + norm.shift, kv, logit
