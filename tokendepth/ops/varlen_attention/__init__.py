"""Causal attention within concatenated sequences of different lengths, without padding."""

from typing import NamedTuple

from torch import Tensor

from tokendepth.ops.varlen_attention.eager import eager as varlen_attention
from tokendepth.ops.varlen_attention.eager import flash_takes

__all__ = ["Varlen", "flash_takes", "varlen_attention"]


class Varlen(NamedTuple):
    """Which rows of `[n, ...]` belong to which sequence."""

    starts: Tensor
    """`[batch + 1]`, int32: where the rows of each sequence begin, and how many there are of all."""
    lengths: Tensor
    """`[batch]`: keys of each sequence, those of earlier passes included; its rows are the last of them."""
    sequence: Tensor
    """`[n]`: which sequence each row is of."""
    columns: Tensor
    """`[n]`: where it stands in that sequence."""
    longest: int
    """No sequence has more rows, as far as is known without asking the device."""
