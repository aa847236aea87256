"""How many CPU threads a run began with: sums are cut by that number, so the last bits of every weight depend on it.

env.json has it, and a resumed run goes on with it, whatever its machine would choose.
"""

from typing import Any

import torch


def keep_threads(begun: Any, here: int) -> str | None:
    """Take the number that a run began with (what env.json has, None of a new run), else `here`, the machine's choice.

    Returns what a user should know: that this is another number, or that it cannot be had.
    """
    number = begun if type(begun) is int and begun > 0 else here
    torch.set_num_threads(number)  # also where it stays the same: without this call MKL may take fewer
    if torch.get_num_threads() != number:
        return (
            f"it began with {number} CPU threads and PyTorch keeps to {here}: the result will differ in its last bits"
        )
    if number != here:
        return f"it goes on with the {number} CPU threads it began with, not with {here}: the result is the same"
    return None
