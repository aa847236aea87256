import torch
from torch import Tensor


def reference(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, low_precision: bool = False) -> Tensor:
    """`w2 . relu(w1 h + b1) + b2` for every token, in the dtype of the weights.

    h: `[..., d]`. w1: `[hidden, d]`. b1: `[hidden]`. w2: `[1, hidden]`. b2: `[1]`. Returns `[...]`.
    With `low_precision` the operands of matrix products are rounded to bfloat16 first; the sums are not.
    """

    def operand(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(w1.dtype) if low_precision else x.to(w1.dtype)

    hidden = torch.relu((operand(h)[..., None, :] * operand(w1)).sum(-1) + b1)
    return (operand(hidden) * operand(w2[0])).sum(-1) + b2[0]
