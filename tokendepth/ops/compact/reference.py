import torch
from torch import Tensor


def reference(active: Tensor) -> Tensor:
    """Where `active` `[batch, time]` is True, as places in the flattened `batch x time`, in order: `[n]`."""
    places = [place for place, flag in enumerate(active.flatten().tolist()) if flag]
    return torch.tensor(places, dtype=torch.long, device=active.device)
