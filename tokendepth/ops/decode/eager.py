"""Of one sequence on a CPU: there the host may look at the decision, and a halted token costs no call at all."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.block_inputs.eager import normalised
from tokendepth.ops.decide import decide
from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.router import halting_logits
from tokendepth.ops.sparse_block import BlockWeights


def inputs(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold) -> BlockInputs:
    """As `reference`, by library calls."""
    column = int(writes)
    layer.seen[0, column] = True if leaving is None else bool(leaving)
    if active is not None and not active.item():
        return BlockInputs(h, None, None)
    rms = norm.shift is None
    x = normalised(h, norm.scale, norm.shift, norm.eps, rms=rms)
    k, v = F.linear(x, keys.weight, keys.bias).view(2, keys.heads, -1)
    layer.keys[0, :, column] = _turned(k, keys.norm, keys.eps, rotation)
    layer.values[0, :, column] = v
    if router is None:
        return BlockInputs(x, None, None)
    logit = halting_logits(normalised(h, None, None, norm.eps, rms=rms) if router.normed else h, *router[:4])
    value, valid, inclusive = threshold
    return BlockInputs(x, None, decide(logit, value, valid, inclusive=inclusive))


def block(h, x, layer, columns, active, weights: BlockWeights, gate, rotation) -> Tensor:
    """As `reference`, by library calls."""
    if active is not None and not active.item():
        return h
    w, end = weights, int(columns) + 1
    q = _turned(F.linear(x, w.query, w.query_bias).view(w.heads, 1, -1), w.query_norm, w.query_eps, rotation)
    k, v, seen = layer.keys[0, :, :end], layer.values[0, :, :end], layer.seen[0, :end]
    q = q.view(len(k), w.heads // len(k), -1)  # heads that share a key
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
    if not seen[:-1].all():  # its own it always sees
        scores[..., :-1].masked_fill_(~seen[:-1], -torch.inf)
    attended = torch.bmm(scores.softmax(-1), v).view(1, 1, -1)
    state = _added(h, F.linear(attended, w.out, w.out_bias), gate)
    normed = normalised(state, w.norm, w.norm_bias, w.eps, rms=w.norm_bias is None)
    return _added(state, _feed_forward(normed, w), gate)


def _added(h: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return h + update if gate is None else gated_add(h, update, gate)


def _turned(x: Tensor, scale: Tensor | None, eps: float, rotation) -> Tensor:
    """`[head, ..., width]`, normalised and turned by the token's position."""
    if scale is not None:
        x = F.rms_norm(x, x.shape[-1:], scale, eps)
    if rotation is None:
        return x
    cos, sin = rotation[0][0, 0], rotation[1][0, 0]
    one, other = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)


def _feed_forward(x: Tensor, w: BlockWeights) -> Tensor:
    hidden = F.linear(x, w.up, w.up_bias)
    if w.activation == "gelu":
        hidden = F.gelu(hidden)
    else:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = (F.silu(gate) if w.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    return F.linear(hidden, w.down, w.down_bias)
