import torch
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.block_inputs.reference import reference as block_inputs
from tokendepth.ops.decide import decide


def reference(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold) -> BlockInputs:
    """Computes norm, key and value of all tokens and discards those of inactive ones."""
    x, kv, logit = block_inputs(h, norm, keys.weight, keys.bias, router)
    k, v = (part.unflatten(-1, (keys.heads, -1)) for part in kv.chunk(2, dim=-1))
    k = turned(rms(k, keys.norm, keys.eps), rotation)
    everyone = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    for slot, column in enumerate(writes[:, 0].tolist()):
        if active is None or active[slot, 0]:
            layer.keys[slot, :, column], layer.values[slot, :, column] = k[slot, 0], v[slot, 0]
        layer.seen[slot, column] = (everyone if leaving is None else leaving)[slot, 0]
    if logit is None:
        return BlockInputs(x, None, None)
    value, valid, inclusive = threshold
    return BlockInputs(x, None, decide(logit, value, valid, inclusive=inclusive, backend="reference"))


def rms(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    return x if scale is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


def turned(x: Tensor, rotation) -> Tensor:
    """`[slot, 1, head, width]`, the pairs (i, i + width / 2) of each head rotated by the token's position."""
    if rotation is None:
        return x
    cos, sin = (part[:, :, None] for part in rotation)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
