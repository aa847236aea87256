import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.decode_inputs.reference import rms, turned
from tokendepth.ops.sparse_block import BlockWeights


def reference(h, x, layer, columns, active, weights: BlockWeights, gate, rotation) -> Tensor:
    """One token after another, straight from the definition."""
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


def feed_forward(x: Tensor, w: BlockWeights) -> Tensor:
    hidden = linear(x, w.up, w.up_bias)
    if w.activation == "gelu":
        hidden = F.gelu(hidden)
    else:
        gate, up = hidden.chunk(2, -1)
        opened = gate.sigmoid() * gate if w.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        hidden = opened * up
    return linear(hidden, w.down, w.down_bias)


def _norm(state: Tensor, w: BlockWeights) -> Tensor:
    if w.norm_bias is None:
        return rms(state, w.norm, w.eps)
    centred = state - state.mean(-1, keepdim=True)
    return rms(centred, w.norm, w.eps) + w.norm_bias
