import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.launch import LOW_PRECISION, compiles_inference


def eager(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """As `reference`, with library calls: on a CPU one per sequence, on a GPU one for all.

    On a GPU, rows in low precision use flash attention, without host synchronisation; others are padded.
    """
    attend = torch.ops.tokendepth.varlen_attention if compiles_inference() else _attend
    return attend(q, k, v, starts, lengths, longest)


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    if not len(q):
        return torch.empty_like(q)
    if q.is_cuda and q.dtype in LOW_PRECISION and k.dim() == 3 and flash_takes(q.shape[2]):
        most = max(longest, 2)  # with 1 it would expect one row in every sequence
        return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, most, most, 0.0, True, False)[0]
    return (_padded if _launches_cost(q) else _by_sequence)(q, k, v, starts.diff(), lengths)


def flash_takes(width: int) -> bool:
    """Whether flash attention supports heads of this width."""
    return width % 8 == 0 and width <= 256


def _launches_cost(q: Tensor) -> bool:
    return q.is_cuda


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
    found, start, grouped = [], 0, q.shape[1] != k.shape[1]
    for b, (rows, keys) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        if rows:
            own, start = slice(start, start + rows), start + rows
            k_b, v_b = (x[own].transpose(0, 1) if x.dim() == 3 else x[b, :, :keys] for x in (k, v))
            seen = None
            if 1 < rows < keys:  # a single row is the last of its sequence and sees everything
                seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
            q_b, causal = q[own].transpose(0, 1), 1 < rows == keys
            attended = F.scaled_dot_product_attention(
                q_b[None], k_b[None], v_b[None], seen, is_causal=causal, enable_gqa=grouped
            )
            found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def _padded(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
    batch, rows, keys = len(counts), *torch.stack([counts.max(), lengths.max()]).tolist()
    sequence = torch.arange(batch, device=q.device).repeat_interleave(counts, output_size=len(q))
    place = torch.arange(len(q), device=q.device) - (counts.cumsum(0) - counts)[sequence]

    def spread(x: Tensor) -> Tensor:
        """`[batch, head, rows, width]`"""
        return x.new_zeros(batch, rows, *x.shape[1:]).index_put((sequence, place), x).transpose(1, 2)

    seen = None
    if k.dim() == 3:  # padding comes last, so no row sees it
        k, v = spread(k), spread(v)
    else:
        k, v = k[:, :, :keys], v[:, :, :keys]
        own = (lengths - counts)[:, None] + torch.arange(rows, device=q.device)
        seen = (torch.arange(keys, device=q.device) <= own[..., None])[:, None]
    out = F.scaled_dot_product_attention(
        spread(q), k, v, seen, is_causal=seen is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)[sequence, place]


# Opaque to torch.compile, since lengths are known only at run time.
_library = torch.library.Library("tokendepth", "FRAGMENT")
_library.define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, SymInt longest) -> Tensor"
)
_library.impl("varlen_attention", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("tokendepth::varlen_attention", lambda q, *_: q.new_empty(q.shape), lib=_library)
