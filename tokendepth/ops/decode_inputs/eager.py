import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.block_inputs.eager import normalised
from tokendepth.ops.decide import decide
from tokendepth.ops.few_rows.eager import linear
from tokendepth.ops.router import halting_logits


def eager(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold) -> BlockInputs:
    """As `reference`, for one sequence on a CPU, with library calls."""
    column = int(writes)
    layer.seen[0, column] = True if leaving is None else bool(leaving)
    if active is not None and not active.item():
        return BlockInputs(h, None, None)
    rms = norm.shift is None
    x = normalised(h, norm.scale, norm.shift, norm.eps, rms=rms)
    k, v = linear(x, keys.weight, keys.bias).view(2, keys.heads, -1)
    layer.keys[0, :, column] = turned(k, keys.norm, keys.eps, rotation)
    layer.values[0, :, column] = v
    if router is None:
        return BlockInputs(x, None, None)
    logit = halting_logits(normalised(h, None, None, norm.eps, rms=rms) if router.normed else h, *router[:4])
    value, valid, inclusive = threshold
    return BlockInputs(x, None, decide(logit, value, valid, inclusive=inclusive))


def turned(x: Tensor, scale: Tensor | None, eps: float, rotation) -> Tensor:
    """`[head, ..., width]`, normalised and rotated by the token's position."""
    if scale is not None:
        x = F.rms_norm(x, x.shape[-1:], scale, eps)
    if rotation is None:
        return x
    cos, sin = rotation[0][0, 0], rotation[1][0, 0]
    one, other = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)
