from torch import Tensor


def reference(h: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """h, update: `[batch, time, d]`. gate: `[batch, time]`, a number or a decision per token."""
    return h + gate[..., None] * update
