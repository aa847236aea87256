"""Causal attention within concatenated sequences of different lengths, without padding."""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.varlen_attention.eager import eager as varlen_attention
from tokendepth.ops.varlen_attention.eager import flash_takes

__all__ = ["Varlen", "flash_takes", "varlen_attention"]


class Varlen(NamedTuple):
    """Which rows of `[n, ...]` belong to which sequence."""

    starts: Tensor
    """`[batch + 1]`, int32: where the rows of each sequence begin, and the total number."""
    lengths: Tensor
    """`[batch]`: number of keys in each sequence, including earlier forward passes; its rows are the last of them."""
    sequence: Tensor
    """`[n]`: the sequence of each row."""
    columns: Tensor
    """`[n]`: the index of each row in its sequence."""
    longest: int
    """An upper bound for the rows of a sequence, known without host synchronisation."""
