from functools import partial

import torch
from torch import Tensor

from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.rows import compact, put, take
from tokendepth.ops.sparse_attention import sparse_attention


def eager(h, x, k, v, active, parts, gate=None, key_valid=None, columns=None, listed=None, rotation=None) -> Tensor:
    """As `reference`, with library products over only the active rows; in place without a gradient."""
    if active is None:
        active = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    places = compact(active)
    add = Tensor.add if gate is None else partial(gated_add, gate=take(gate, places))
    turns = None if rotation is None else tuple(take(part.expand(len(h), -1, -1), places) for part in rotation)
    q = parts.query(take(x, places), turns)
    attended = sparse_attention(q, k, v, active, key_valid, columns).flatten(1)
    states = add(take(h, places), parts.out(attended))
    states = add(states, parts.ffn(parts.norm(states)))
    if torch.is_grad_enabled():
        return put(h, places, states)
    h = h.contiguous()
    h.flatten(0, 1).index_copy_(0, places, states)
    return h
