import torch
from torch import Tensor


def reference(h, x, k, v, active, parts, gate=None, key_valid=None, columns=None, listed=None, rotation=None) -> Tensor:
    """Computes every token and discards the results of inactive ones."""
    batch, heads, keys, width = k.shape
    time = h.shape[1]
    q = parts.query(x, rotation).transpose(1, 2)
    k, v = (kept.repeat_interleave(q.shape[1] // heads, dim=1) for kept in (k, v))
    place = torch.arange(keys, device=h.device)
    own = place[keys - time :].expand(batch, -1) if columns is None else columns
    own = own[:, None, :, None]
    seen = place <= own
    if key_valid is not None:
        seen = seen & (key_valid[:, None, None, :] | (place == own))
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(~seen, float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    weight = torch.ones_like(h[..., :1]) if gate is None else gate[..., None].to(h.dtype)
    new = h + weight * parts.out(attended)
    new = new + weight * parts.ffn(parts.norm(new))
    return new if active is None else torch.where(active[..., None], new, h)
