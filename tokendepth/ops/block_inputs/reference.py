from torch import Tensor

from tokendepth.ops.router.reference import reference as halting_logits


def reference(h: Tensor, norm, w_kv: Tensor, b_kv: Tensor | None, router) -> tuple[Tensor, Tensor, Tensor | None]:
    """The norms written out: mean 0 and variance 1, scaled and shifted (LayerNorm), or mean square 1, scaled."""
    centred = h if norm.shift is None else h - h.mean(-1, keepdim=True)
    plain = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = plain * norm.scale
    x = x if norm.shift is None else x + norm.shift
    kv = x @ w_kv.T
    logit = None if router is None else halting_logits(plain if router.normed else h, *router[:4])
    return x, kv if b_kv is None else kv + b_kv, logit
