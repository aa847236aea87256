from torch import Tensor


def eager(logit: Tensor, threshold: Tensor | float, valid: Tensor | None, inclusive: bool) -> tuple[Tensor, None]:
    """As `reference`, without the list: library products use the rows that `compact` finds."""
    active = -logit >= threshold if inclusive else -logit > threshold
    return active if valid is None else active & valid, None
