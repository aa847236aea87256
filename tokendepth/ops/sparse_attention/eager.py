import torch
import torch.nn.functional as F
from torch import Tensor


def eager(q: Tensor, k: Tensor, v: Tensor, active: Tensor, key_valid: Tensor | None = None) -> Tensor:
    """As `reference`, one library call per sequence: no padding, so what is executed is exactly the active rows."""
    keys = k.shape[2]
    key_position = torch.arange(keys, device=k.device)
    position = active.nonzero()[:, 1] + (keys - active.shape[1])
    allowed = key_position <= position[:, None]
    if key_valid is not None:
        rows_valid = key_valid.repeat_interleave(active.sum(1), dim=0)
        allowed &= rows_valid | (key_position == position[:, None])
    counts = active.sum(1).tolist()
    out = []
    for b, (q_b, allowed_b) in enumerate(zip(q.split(counts), allowed.split(counts), strict=True)):
        if q_b.shape[0]:
            row = F.scaled_dot_product_attention(q_b.transpose(0, 1)[None], k[b : b + 1], v[b : b + 1], allowed_b)
            out.append(row[0].transpose(0, 1))
    return torch.cat(out) if out else torch.empty_like(q)
