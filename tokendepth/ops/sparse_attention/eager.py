import torch
import torch.nn.functional as F
from torch import Tensor


def eager(q: Tensor, k: Tensor, v: Tensor, active: Tensor, key_valid: Tensor | None = None) -> Tensor:
    """As `reference`, one library call per sequence: no padding, so what is executed is exactly the active rows."""
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
    attend = torch.ops.tokendepth.attention_by_sequence if compiling else _by_sequence
    return attend(q, k, v, bias, counts)


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """`bias` `[n, keys]` is added to the scores, `counts` `[batch]` says how many of the rows are of each sequence."""
    if len(k) == 1 and len(q):
        return _of_one(q, k, v, bias).contiguous()  # as the compiler is told
    rows = counts.tolist()
    parts = enumerate(zip(q.split(rows), bias.split(rows), strict=True))
    out = [_of_one(q_b, k[b : b + 1], v[b : b + 1], bias_b) for b, (q_b, bias_b) in parts if len(q_b)]
    return torch.cat(out) if out else torch.empty_like(q)


def _of_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, bias)[0].transpose(0, 1)


# To a compiler the loop is one op: its lengths are known only when it runs. Registered without the checks of
# `custom_op`, which take longer than a short sequence's rows.
_library = torch.library.Library("tokendepth", "FRAGMENT")
_library.define("attention_by_sequence(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor counts) -> Tensor")
_library.impl("attention_by_sequence", _by_sequence, "CompositeExplicitAutograd")
torch.library.register_fake("tokendepth::attention_by_sequence", lambda q, *_: q.new_empty(q.shape), lib=_library)
