"""Causal attention within packed sequences whose queries, keys and values one product made; see kernel.py.

Queries and keys are normed and turned where attention reads them, so that nothing is written between the product that
makes them and the one that takes what was attended. `layers/attention.py` has the same by library calls, which are as
fast for whole batches of 64 x 256 tokens.
"""

from torch import Tensor

from tokendepth.ops.launch import serves

WIDTHS = 32, 128
"""Of heads: half of one is 16 numbers at least, which tensor cores take."""
LONGEST = 512
"""Tokens of a sequence, packed or not. Keys are normed and turned anew for every tile of rows that sees them."""


def takes(x: Tensor, width: int, longest: int) -> bool:
    """Whether the kernel is the way for rows `x`, heads of this width and sequences of at most so many rows."""
    smallest, largest = WIDTHS
    return serves(x) and width % 2 == 0 and smallest <= width <= largest and longest <= LONGEST
