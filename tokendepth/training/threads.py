"""The number of CPU threads of a run: sums are split by it, so the last bits of every weight depend on it.

env.json records it, and a resumed run uses it again, whatever its machine would choose.
"""

from typing import Any

import torch


def keep_threads(begun: Any, here: int) -> str | None:
    """Set the number of threads that a run began with (from env.json; None for a new run), else `here`, the default.

    Returns a line for the user if that is another number than `here`, or cannot be set.
    """
    number = begun if type(begun) is int and begun > 0 else here
    torch.set_num_threads(number)  # even if unchanged: without this call MKL may use fewer
    if torch.get_num_threads() != number:
        return (
            f"it began with {number} CPU threads and PyTorch keeps to {here}: the result will differ in its last bits"
        )
    if number != here:
        return f"it goes on with the {number} CPU threads it began with, not with {here}: the result is the same"
    return None
