import torch
from torch import Tensor


def reference(
    logit: Tensor, threshold: Tensor | float, valid: Tensor | None, inclusive: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Token by token; after the last active token, the list is filled with -1."""
    limits = torch.as_tensor(threshold, dtype=logit.dtype).expand(logit.shape)
    active, index, starts = torch.zeros_like(logit, dtype=torch.bool), [], [0]
    for b, sequence in enumerate(logit.tolist()):
        for t, value in enumerate(sequence):
            above = -value > float(limits[b, t]) or (inclusive and -value == float(limits[b, t]))
            if above and (valid is None or bool(valid[b, t])):
                active[b, t] = True
                index.append(b * len(sequence) + t)
        starts.append(len(index))
    padded = index + [-1] * (logit.numel() - len(index))
    return active, (torch.tensor(padded, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))
