"""Causal attention within packed sequences, directly from the joint projection of queries, keys and values.

Queries and keys are normalised and rotated where attention reads them, so nothing is written to memory in between; see
kernel.py. `layers/attention.py` does the same with library calls, which are as fast for full batches of 64 x 256
tokens.
"""

from torch import Tensor

from tokendepth.ops.launch import serves

WIDTHS = 32, 128
"""Smallest and largest head width: half a head needs at least the 16 elements that tensor cores take."""
LONGEST = 512
"""Longest sequence. Keys are normalised and rotated again for every tile of rows that sees them."""


def takes(x: Tensor, width: int, longest: int) -> bool:
    """Whether to use the kernel for rows `x`, heads of this width and sequences of at most `longest` rows."""
    smallest, largest = WIDTHS
    return serves(x) and width % 2 == 0 and smallest <= width <= largest and longest <= LONGEST
