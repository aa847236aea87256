"""Which tokens are active: router logits compared with a threshold; for kernels also the list of active tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokendepth.ops.launch import serves, unknown_backend
from tokendepth.ops.rows import Listed

__all__ = ["Decision", "decide", "list_active"]


class Decision(NamedTuple):
    active: Tensor
    """`[batch, time]`, bool."""
    logit: Tensor
    """`[batch, time]`: the router's logits."""
    keep: Tensor | None = None
    """`sigmoid(-logit)`, if a kernel has already computed it; `kept` returns it in any case."""
    listed: Listed | None = None
    """The list of active tokens, if a kernel made it."""

    def kept(self) -> Tensor:
        """`sigmoid(-logit)`, which scales the updates of active tokens."""
        return torch.sigmoid(-self.logit) if self.keep is None else self.keep


def decide(
    logit: Tensor,
    threshold: Tensor | float,
    valid: Tensor | None = None,
    *,
    inclusive: bool = False,
    states: Tensor | None = None,
    backend: str = "auto",
) -> Decision:
    """A token is active if it is `valid` and its score, `-logit`, is above the threshold (`inclusive`: or equal to it).

    logit: `[batch, time]`. threshold: a number, or a tensor with one number or one per token. `auto` is the kernel if
    kernels support the tokens' `states`, and `eager` otherwise.
    """
    if backend == "auto":
        backend = "kernel" if states is not None and serves(states) else "eager"
    if backend == "kernel":
        from tokendepth.ops.decide.kernel import kernel as run
    elif backend == "eager":
        from tokendepth.ops.decide.eager import eager as run
    elif backend == "reference":
        from tokendepth.ops.decide.reference import reference as run
    else:
        raise unknown_backend(backend)
    active, listed = run(logit, threshold, valid, inclusive)
    return Decision(active, logit, listed=listed and Listed(*listed))


def list_active(active: Tensor, states: Tensor) -> Listed | None:
    """The list of active tokens `[batch, time]` if kernels support `states`; None if rows are found in another way."""
    if not serves(states):
        return None
    from tokendepth.ops.decide.kernel import list_active as run

    return Listed(*run(active))
