import torch
from torch import Tensor


def reference(active: Tensor) -> Tensor:
    """Indices in the flattened `batch x time` at which `active` `[batch, time]` is True, in order: `[n]`."""
    places = [place for place, flag in enumerate(active.flatten().tolist()) if flag]
    return torch.tensor(places, dtype=torch.long, device=active.device)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, active: Tensor, listed=None) -> Tensor:
    """Multiplies every row and sets inactive ones to zero."""
    y = x @ weight.T
    return torch.where(active[..., None], y if bias is None else y + bias, 0)
