import torch
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor, key_valid: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """One attention row per active token, straight from the definition.

    q: `[n, head, width]`, a row for each True in `active`, in row-major order. k, v: `[batch, kv head, keys, width]`;
    query heads share K/V heads in equal groups. active: `[batch, time]` bool. columns: `[batch, time]`, each token's
    index among the keys, increasing along a sequence; None: the tokens are the last keys. key_valid: `[batch, keys]`,
    False for keys that must not be seen (a token always sees its own). Returns `[n, head, width]`.
    """
    out = torch.empty_like(q)
    offset, group = k.shape[2] - active.shape[1], q.shape[1] // k.shape[1]
    for row, (b, t) in enumerate(active.nonzero().tolist()):
        position = offset + t if columns is None else int(columns[b, t])
        seen = [s for s in range(position + 1) if key_valid is None or key_valid[b, s] or s == position]
        for head in range(q.shape[1]):
            scores = k[b, head // group, seen] @ q[row, head] / q.shape[2] ** 0.5
            out[row, head] = scores.softmax(0) @ v[b, head // group, seen]
    return out
