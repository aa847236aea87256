import torch
import torch.nn.functional as F
from torch import Tensor


def carry_rows(rows: Tensor, active: Tensor) -> Tensor:
    """`[batch, time, d]`: for each token the row of the last active token in its sequence; zeros before the first.

    rows: `[batch, k, d]`, the rows of the active tokens in order; more may follow. active: `[batch, time]`. Equals
    `carry_on` of these rows in their places with `~active`, which would go through all tokens.
    """
    batch, count, d = rows.shape
    index = active.cumsum(1) + (count + 1) * torch.arange(batch, device=rows.device)[:, None]
    return _Repeat.apply(F.pad(rows, (0, 0, 1, 0)).flatten(0, 1), index.flatten()).view(*active.shape, d)


class _Repeat(torch.autograd.Function):
    """`rows[index]` for a non-decreasing index: a row's gradient is the sum over one contiguous stretch.

    The library's gradient adds row by row, on a GPU in a nondeterministic order.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor) -> Tensor:
        ctx.count = len(rows)
        ctx.save_for_backward(index)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        starts = torch.searchsorted(index, torch.arange(ctx.count + 1, device=index.device))
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        # `unsafe` skips a check of the offsets that would synchronise with the device.
        sums = torch.segment_reduce(exact, "sum", offsets=starts, axis=0, initial=0, unsafe=True)
        return sums.to(grad.dtype), None
