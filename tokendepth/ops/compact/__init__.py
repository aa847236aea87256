"""Active tokens as a list of rows, and rows back to where they came from."""

from torch import Tensor

from tokendepth.ops.compact.eager import eager as compact

__all__ = ["compact", "put", "take"]


def take(x: Tensor, rows: Tensor) -> Tensor:
    """`[batch, time, ...] -> [n, ...]`: the rows that `compact` listed."""
    return x.flatten(0, 1).index_select(0, rows)


def put(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """`x` `[batch, time, d]` with `values` `[n, d]` in the place of the listed rows."""
    return x.flatten(0, 1).index_copy(0, rows, values).view_as(x)
