import torch
import torch.nn.functional as F
from torch import Tensor


def eager(q: Tensor, k: Tensor, v: Tensor, active: Tensor, key_valid: Tensor | None = None) -> Tensor:
    """As `reference`, by the library: on a CPU a call per sequence, so that exactly the active rows are executed.

    On a GPU so many launches take longer than all else: there it is one call, every sequence's rows padded to the
    longest.
    """
    keys, counts = k.shape[2], active.sum(1)
    key_position = torch.arange(keys, device=k.device)
    position = active.nonzero()[:, 1:] + (keys - active.shape[1])
    seen = key_position <= position
    if key_valid is not None:
        rows_valid = key_valid.repeat_interleave(counts, dim=0)
        seen &= rows_valid | (key_position == position)
    # What the library would make of `seen` too, but once a call.
    bias = torch.zeros((), dtype=q.dtype, device=q.device).where(seen, -torch.inf)
    compiling = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    attend = torch.ops.tokendepth.ragged_attention if compiling else _attend
    return attend(q, k, v, bias, counts)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """`bias` `[n, keys]` is added to the scores, `counts` `[batch]` says how many of the rows are of each sequence."""
    if not len(q):
        return torch.empty_like(q)
    if len(k) == 1:
        return _of_one(q, k, v, bias).contiguous()  # as the compiler is told
    return _padded(q, k, v, bias, counts) if _launches_cost(q) else _by_sequence(q, k, v, bias, counts)


def _launches_cost(q: Tensor) -> bool:
    return q.is_cuda


def _padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    sequence = torch.arange(len(k), device=k.device).repeat_interleave(counts, output_size=len(q))
    place = torch.arange(len(q), device=k.device) - (counts.cumsum(0) - counts)[sequence]
    longest = int(counts.max())
    rows = q.new_zeros(len(k), longest, *q.shape[1:]).index_put((sequence, place), q)
    biases = bias.new_zeros(len(k), longest, bias.shape[1]).index_put((sequence, place), bias)
    out = F.scaled_dot_product_attention(rows.transpose(1, 2), k, v, biases[:, None])
    return out.transpose(1, 2)[sequence, place]


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    rows = counts.tolist()
    parts = enumerate(zip(q.split(rows), bias.split(rows), strict=True))
    return torch.cat([_of_one(q_b, k[b : b + 1], v[b : b + 1], bias_b) for b, (q_b, bias_b) in parts if len(q_b)])


def _of_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, bias)[0].transpose(0, 1)


# To a compiler it is one op: its lengths are known only when it runs. Registered without the checks of
# `custom_op`, which take longer than a short sequence's rows.
_library = torch.library.Library("tokendepth", "FRAGMENT")
_library.define("ragged_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor counts) -> Tensor")
_library.impl("ragged_attention", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("tokendepth::ragged_attention", lambda q, *_: q.new_empty(q.shape), lib=_library)
