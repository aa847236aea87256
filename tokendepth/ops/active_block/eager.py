from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.compact import compact, put, take
from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.sparse_attention import sparse_attention


def eager(h, x, k, v, active, weights, halt=None, key_valid=None, listed=None) -> Tensor:
    """As `reference`, library products over the active rows alone; without a gradient in place."""
    rows = compact(active)
    add = Tensor.add if halt is None else partial(gated_add, gate=torch.sigmoid(-take(halt, rows)))
    q = F.linear(take(x, rows), weights.query).unflatten(-1, (k.shape[1], -1))
    attended = sparse_attention(q, k, v, active, key_valid).flatten(1)
    states = add(take(h, rows), F.linear(attended, weights.out))
    normed = F.layer_norm(states, states.shape[-1:], weights.norm, weights.norm_bias)
    hidden = F.gelu(F.linear(normed, weights.up, weights.up_bias))
    states = add(states, F.linear(hidden, weights.down, weights.down_bias))
    if torch.is_grad_enabled():
        return put(h, rows, states)
    h = h.contiguous()
    h.flatten(0, 1).index_copy_(0, rows, states)
    return h
