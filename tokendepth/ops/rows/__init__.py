"""Some of a batch's tokens as rows: listed, gathered, scattered back, and multiplied by a matrix.

If the number of rows is known beforehand, as in training, `ChosenRows` takes and spreads them with its own gradient.
The library's gradient of a gather adds rows one by one, because two might come from the same place. Here all places
differ, so the gradient of taking is spreading and vice versa, and both only read by index.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.rows.eager import eager as compact

__all__ = [
    "ChosenRows",
    "Listed",
    "compact",
    "first_places",
    "last_active",
    "product_of_rows",
    "put",
    "put_active",
    "take",
]


class Listed(NamedTuple):
    """The active tokens of all sequences, one sequence after another; only the device knows their number."""

    places: Tensor
    """Their places in `batch x time`, int32; long enough for all tokens."""
    starts: Tensor
    """`[batch + 1]`, int32: where each sequence's tokens begin, and the total number."""


def take(x: Tensor, places: Tensor) -> Tensor:
    """`[batch, time, ...] -> [n, ...]`: the rows that `compact` listed."""
    return x.flatten(0, 1).index_select(0, places)


def put(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """`x` `[batch, time, d]` with the listed rows replaced by `values` `[n, d]`."""
    return x.flatten(0, 1).index_copy(0, places, values).view_as(x)


def first_places(active: Tensor, listed: Listed | None, count: int) -> Tensor:
    """`count` places: first those of the active tokens, in the order of `compact`, then arbitrary ones."""
    if listed is None:
        return torch.nonzero_static(active.flatten(), size=count, fill_value=0).squeeze(1)
    return listed.places[:count].clamp(0, active.numel() - 1).long()  # the rest of the list was never written


def put_active(x: Tensor, active: Tensor, values: Tensor) -> Tensor:
    """`x` `[batch, time, d]` with active tokens replaced, in order, by the first of `values` `[n, d]`."""
    row = (active.flatten().cumsum(0) - 1).clamp(0, len(values) - 1)
    return torch.where(active[..., None], values.index_select(0, row).view_as(x), x)


def last_active(values: Tensor, active: Tensor) -> Tensor:
    """`[batch, time, d]`: for each token the row in `values` `[n, d]` of the last active token in its sequence.

    `values` are those of the active tokens, in order; more may follow. Tokens before the first active one get zeros.
    """
    row = torch.where(active.cumsum(1) > 0, active.flatten().cumsum(0).view_as(active), 0).flatten()
    return F.pad(values, (0, 0, 1, 0)).index_select(0, row).view(*active.shape, -1)


def product_of_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: Tensor,
    listed: Listed | None = None,
    backend: str = "auto",
) -> Tensor:
    """`x w^T + bias` for the active rows of `x` `[batch, time, d]`, zero for the others: `[batch, time, out]`.

    `auto` is the kernel for low precision on a GPU without a gradient, and `eager` otherwise.
    """
    if backend == "auto":
        backend = "kernel" if serves(x) else "eager"
    if backend == "kernel":
        from tokendepth.ops.rows.kernel import product as run
    elif backend == "eager":
        from tokendepth.ops.rows.eager import product as run
    elif backend == "reference":
        from tokendepth.ops.rows.reference import product as run
    else:
        raise unknown_backend(backend)
    return run(x, weight, bias, active, listed)


class ChosenRows(NamedTuple):
    places: Tensor
    """`[n]`: indices of the chosen tokens, all different."""
    rank: Tensor
    """`[tokens]`: the row of each token; n if it is not chosen."""

    @classmethod
    def at(cls, places: Tensor, tokens: int) -> "ChosenRows":
        order = torch.arange(len(places), device=places.device)
        return cls(places, torch.full((tokens,), len(places), device=places.device).scatter(0, places, order))

    @property
    def chosen(self) -> Tensor:
        """`[tokens]` bool"""
        return self.rank < len(self.places)

    def take(self, x: Tensor) -> Tensor:
        """`[tokens, ...] -> [n, ...]`"""
        return _Take.apply(x, *self)

    def spread(self, values: Tensor) -> Tensor:
        """`[n, ...] -> [tokens, ...]`, zero for tokens that are not chosen."""
        return _Spread.apply(values, *self)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, rank: Tensor) -> Tensor:
        ctx.save_for_backward(places, rank)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ChosenRows(*ctx.saved_tensors).spread(grads[0]), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, places: Tensor, rank: Tensor) -> Tensor:
        ctx.save_for_backward(places, rank)
        n = len(places)
        if not n:
            return values.new_zeros(len(rank), *values.shape[1:])
        chosen = (rank < n).view(-1, *(1,) * (values.dim() - 1))
        return torch.where(chosen, values.index_select(0, rank.clamp(max=n - 1)), 0)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ChosenRows(*ctx.saved_tensors).take(grads[0]), None, None
