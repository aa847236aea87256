"""A known number of a batch's tokens, taken out as rows and put back, for training.

The library's gradient of a gather adds rows up wherever they came from, one by one, because two might have come from
the same place. Here none do, so the gradient of taking rows is spreading them, that of spreading is taking, and both
are reads by index, which a compiler makes part of whatever comes next.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ChosenRows", "spread", "take"]


class ChosenRows(NamedTuple):
    places: Tensor
    """`[n]`: which tokens they are, of all; no two alike."""
    rank: Tensor
    """`[tokens]`: which of the rows each token is, n where it is none."""

    @classmethod
    def at(cls, places: Tensor, tokens: int) -> "ChosenRows":
        order = torch.arange(len(places), device=places.device)
        return cls(places, torch.full((tokens,), len(places), device=places.device).scatter(0, places, order))

    @property
    def chosen(self) -> Tensor:
        """`[tokens]` bool"""
        return self.rank < len(self.places)


def take(x: Tensor, rows: ChosenRows) -> Tensor:
    """`[tokens, ...] -> [n, ...]`"""
    return _Take.apply(x, *rows)


def spread(values: Tensor, rows: ChosenRows) -> Tensor:
    """`[n, ...] -> [tokens, ...]`, zero where no row goes."""
    return _Spread.apply(values, *rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, rank: Tensor) -> Tensor:
        ctx.save_for_backward(places, rank)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return spread(grads[0], ChosenRows(*ctx.saved_tensors)), None, None


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
        return take(grads[0], ChosenRows(*ctx.saved_tensors)), None, None
