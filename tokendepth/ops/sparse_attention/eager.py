import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.launch import compiles_inference

FEW_SCORES = 2**19
"""A single sequence with at most this many scores uses plain products: as fast as the library, with less overhead."""
MANY_ROWS = 48
"""With at least this many rows, those that see no key in the second half get a call of their own."""


def eager(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor, key_valid: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """As `reference`, with library calls: on a CPU one or two per sequence, so that only active rows are computed.

    On a GPU that many launches would dominate, so there is a single call, with each sequence's rows padded to the
    longest. A short single sequence uses plain products.
    """
    keys, offset = k.shape[2], k.shape[2] - active.shape[1]
    key_position = torch.arange(keys, device=k.device)
    # Recomputed, because with `rows % time` torch.compile would put a division into every score.
    at = active.nonzero()
    position = at[:, 1:] + offset if columns is None else columns[at[:, 0], at[:, 1]][:, None]
    seen = key_position <= position
    if key_valid is not None:
        seen &= key_valid[at[:, 0]] | (key_position == position)
    # The library would convert `seen` in the same way, but in every call.
    bias = torch.zeros((), dtype=q.dtype, device=q.device).where(seen, -torch.inf)
    if len(k) == 1 and q.shape[1] * active.shape[1] * keys <= FEW_SCORES:
        alone = torch.ops.tokendepth.lone_attention if compiles_inference() else _of_one_sequence
        return alone(q, k, v, bias)
    if columns is None:
        second_half = max(0, keys // 2 - offset)
        halves = active[:, :second_half], active[:, second_half:]
    else:
        early = active & (columns < keys // 2)
        halves = early, active & ~early
    counts = torch.stack([half.sum(1) for half in halves], 1)
    attend = torch.ops.tokendepth.ragged_attention if compiles_inference() else _attend
    return attend(q, k, v, bias, counts)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """bias: `[n, keys]`, added to the scores. counts: `[batch, 2]`, rows in each half of the keys."""
    if not len(q):
        return torch.empty_like(q)
    return _padded(q, k, v, bias, counts.sum(1)) if _launches_cost(q) else _by_sequence(q, k, v, bias, counts)


def _launches_cost(q: Tensor) -> bool:
    return q.is_cuda


def _padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    sequence = torch.arange(len(k), device=k.device).repeat_interleave(counts, output_size=len(q))
    place = torch.arange(len(q), device=k.device) - (counts.cumsum(0) - counts)[sequence]
    longest = int(counts.max())
    rows = q.new_zeros(len(k), longest, *q.shape[1:]).index_put((sequence, place), q)
    biases = bias.new_zeros(len(k), longest, bias.shape[1]).index_put((sequence, place), bias)
    out = F.scaled_dot_product_attention(
        rows.transpose(1, 2), k, v, biases[:, None], enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)[sequence, place]


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    keys, start, found, grouped = k.shape[2], 0, [], q.shape[1] != k.shape[1]
    for b, (early, late) in enumerate(counts.tolist()):
        groups = [(early, keys // 2), (late, keys)] if early + late >= MANY_ROWS else [(early + late, keys)]
        for rows, seen in groups:
            if rows:
                own, start = slice(start, start + rows), start + rows
                k_b, v_b = k[b : b + 1, :, :seen], v[b : b + 1, :, :seen]
                q_b = q[own].transpose(0, 1)[None]
                attended = F.scaled_dot_product_attention(q_b, k_b, v_b, bias[own, :seen], enable_gqa=grouped)
                found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def _of_one_sequence(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Product, softmax, product: there is only one sequence, so nothing has to be split."""
    k, v, group = k[0], v[0], q.shape[1] // k.shape[1]
    if group > 1:  # query heads that share a key head become extra rows of it, so no key is copied
        rows = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
        attended = _products(rows, k, v, bias.repeat(group, 1))
        return attended.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2).contiguous()
    return _products(q.transpose(0, 1), k, v, bias).transpose(0, 1).contiguous()


def _products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[2] ** -0.5)
    return torch.bmm(scores.softmax(-1), v)


# Opaque to torch.compile, since lengths are known only at run time. Registered without the checks of `custom_op`, which
# take longer than attention in a short sequence.
_library = torch.library.Library("tokendepth", "FRAGMENT")
_library.define("ragged_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor counts) -> Tensor")
_library.define("lone_attention(Tensor q, Tensor k, Tensor v, Tensor bias) -> Tensor")
for _name, _function in {"ragged_attention": _attend, "lone_attention": _of_one_sequence}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tokendepth::{_name}", lambda q, *_: q.new_empty(q.shape), lib=_library)
