import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, longest: int = 0) -> Tensor:
    """One attention row after another, straight from the definition.

    q: `[n, head, width]`, the rows of all sequences, concatenated. k, v: rows as in q, `[n, kv head, width]`, or a
    cache, `[batch, kv head, columns, width]`; query heads share K/V heads in equal groups. starts: `[batch + 1]`, where
    the rows of each sequence begin, and n. lengths: `[batch]`, the number of keys in each sequence, of which its rows
    are the last; equals the number of rows if k and v are rows. longest: rows of the longest sequence, or more.
    Returns `[n, head, width]`.
    """
    out, group, row = torch.empty_like(q), q.shape[1] // k.shape[1], 0
    for b, (count, length) in enumerate(zip(starts.diff().tolist(), lengths.tolist(), strict=True)):
        first = row
        for position in range(length - count, length):
            for head in range(q.shape[1]):
                if k.dim() == 3:
                    keys, values = (x[first : first + position + 1, head // group] for x in (k, v))
                else:
                    keys, values = (x[b, head // group, : position + 1] for x in (k, v))
                scores = keys @ q[row, head] / q.shape[2] ** 0.5
                out[row, head] = scores.softmax(0) @ values
            row += 1
    return out
