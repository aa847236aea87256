import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, active: Tensor, key_valid: Tensor | None = None) -> Tensor:
    """One attention row per active token, written as the definition reads.

    q: `[n, head, width]`, a row for each True of `active`, in row-major order. k, v: `[batch, head, keys, width]`.
    active: `[batch, time]` bool; its columns are the last `time` of the keys. key_valid: `[batch, keys]`, False where
    a key must not be seen (a token always sees its own). Returns `[n, head, width]`.
    """
    out = torch.empty_like(q)
    offset = k.shape[2] - active.shape[1]
    for row, (b, t) in enumerate(active.nonzero().tolist()):
        position = offset + t
        seen = [s for s in range(position + 1) if key_valid is None or key_valid[b, s] or s == position]
        for head in range(q.shape[1]):
            scores = k[b, head, seen] @ q[row, head] / q.shape[2] ** 0.5
            out[row, head] = scores.softmax(0) @ v[b, head, seen]
    return out
