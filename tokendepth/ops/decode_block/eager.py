import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.block_inputs.eager import normalised
from tokendepth.ops.decode_inputs.eager import turned
from tokendepth.ops.few_rows.eager import linear
from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.sparse_block import BlockWeights


def eager(h, x, layer, columns, active, weights: BlockWeights, gate, rotation) -> Tensor:
    """As `reference`, for one sequence on a CPU, with library calls."""
    if active is not None and not active.item():
        return h
    w, end = weights, int(columns) + 1
    q = turned(linear(x, w.query, w.query_bias).view(w.heads, 1, -1), w.query_norm, w.query_eps, rotation)
    k, v, seen = layer.keys[0, :, :end], layer.values[0, :, :end], layer.seen[0, :end]
    q = q.view(len(k), w.heads // len(k), -1)  # query heads by the key head that they share
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
    if not seen[:-1].all():  # its own key is always seen
        scores[..., :-1].masked_fill_(~seen[:-1], -torch.inf)
    attended = torch.bmm(scores.softmax(-1), v).view(1, 1, -1)
    state = _added(h, linear(attended, w.out, w.out_bias), gate)
    normed = normalised(state, w.norm, w.norm_bias, w.eps, rms=w.norm_bias is None)
    return _added(state, _feed_forward(normed, w), gate)


def _added(h: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return h + update if gate is None else gated_add(h, update, gate)


def _feed_forward(x: Tensor, w: BlockWeights) -> Tensor:
    hidden = linear(x, w.up, w.up_bias)
    if w.activation == "gelu":
        hidden = F.gelu(hidden)
    else:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = (F.silu(gate) if w.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
    return linear(hidden, w.down, w.down_bias)
