import torch
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.block_inputs.reference import reference as block_inputs
from tokendepth.ops.decide import decide
from tokendepth.ops.sparse_block import BlockWeights


def inputs(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold) -> BlockInputs:
    """Everybody's norm, key and value; what is not `active` is discarded."""
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


def block(h, x, layer, columns, active, weights: BlockWeights, gate, rotation) -> Tensor:
    """One token after the other, written as the definition reads."""
    w, heads = weights, weights.heads
    q = turned(rms(linear(x, w.query, w.query_bias).unflatten(-1, (heads, -1)), w.query_norm, w.query_eps), rotation)
    group = heads // layer.keys.shape[1]
    for slot, own in enumerate(columns[:, 0].tolist()):
        if active is not None and not active[slot, 0]:
            continue
        seen = [column for column in range(own + 1) if layer.seen[slot, column] or column == own]
        rows = []
        for head in range(heads):
            k, v = (part[slot, head // group, seen] for part in (layer.keys, layer.values))
            scores = k @ q[slot, 0, head] / q.shape[-1] ** 0.5
            rows.append(scores.softmax(0) @ v)
        scale = 1.0 if gate is None else gate[slot, 0].to(h.dtype)
        state = h[slot, 0] + scale * linear(torch.cat(rows), w.out, w.out_bias)
        state = state + scale * feed_forward(_norm(state, w), w)
        h[slot, 0] = state
    return h


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def rms(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    return x if scale is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


def turned(x: Tensor, rotation) -> Tensor:
    """`[slot, 1, head, width]`, the pairs (i, i + width / 2) of each head turned by its token's position."""
    if rotation is None:
        return x
    cos, sin = (part[:, :, None] for part in rotation)
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def feed_forward(x: Tensor, w: BlockWeights) -> Tensor:
    hidden = linear(x, w.up, w.up_bias)
    if w.activation == "gelu":
        hidden = torch.nn.functional.gelu(hidden)
    else:
        gate, up = hidden.chunk(2, -1)
        opened = (
            gate.sigmoid() * gate if w.activation == "swiglu" else torch.nn.functional.gelu(gate, approximate="tanh")
        )
        hidden = opened * up
    return linear(hidden, w.down, w.down_bias)


def _norm(state: Tensor, w: BlockWeights) -> Tensor:
    if w.norm_bias is None:
        return rms(state, w.norm, w.eps)
    centred = state - state.mean(-1, keepdim=True)
    return rms(centred, w.norm, w.eps) + w.norm_bias
