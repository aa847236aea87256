"""The number of CPU threads of a run. Sums are split over threads, so the last bits of every weight depend on it.

env.json records the number, and a resumed run uses it again, whatever the machine's default is.
"""

from typing import Any

import torch


def keep_threads(begun: Any, here: int) -> str | None:
    """Use as many threads as the run began with (`begun`, from env.json), or for a new run `here`, the default.

    Returns a line for the user if that differs from `here` or cannot be set.
    """
    number = begun if type(begun) is int and begun > 0 else here
    torch.set_num_threads(number)  # even if unchanged: without this call MKL may use fewer
    if torch.get_num_threads() != number:
        return f"it began with {number} CPU threads, but PyTorch uses {here}: the last bits of the result will differ"
    if number != here:
        return f"it continues with the {number} CPU threads it began with, not {here}: the result is the same"
    return None
