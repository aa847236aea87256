import torch
import torch.nn.functional as F
from torch import Tensor


def reference(h, x, k, v, active, weights, halt=None, key_valid=None, listed=None) -> Tensor:
    """Every token is computed, and what is not active is thrown away."""
    batch, heads, keys, width = k.shape
    time = h.shape[1]
    q = F.linear(x, weights.query).unflatten(-1, (heads, width)).transpose(1, 2)
    place, own = torch.arange(keys, device=h.device), torch.arange(keys - time, keys, device=h.device)[:, None]
    seen = (place <= own).expand(batch, 1, time, keys)
    if key_valid is not None:
        seen = seen & (key_valid[:, None, None, :] | (place == own))
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(~seen, float("-inf"))
    attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    weight = torch.ones_like(h[..., :1]) if halt is None else torch.sigmoid(-halt)[..., None].to(h.dtype)
    new = h + weight * F.linear(attended, weights.out)
    normed = F.layer_norm(new, new.shape[-1:], weights.norm, weights.norm_bias)
    hidden = F.gelu(F.linear(normed, weights.up, weights.up_bias))
    new = new + weight * F.linear(hidden, weights.down, weights.down_bias)
    return torch.where(active[..., None], new, h)
