"""How the updates of active tokens reach all tokens: `carry` in `span.py`."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokendepth.context import Context
from tokendepth.methods.span_deciders import Boundary, Decider
from tokendepth.ops.carry_on import carry_on, carry_rows


@dataclass(frozen=True)
class Passing:
    """One forward pass through a span: which tokens are active, and by which scores."""

    carry: Literal["none", "last", "smooth"]
    decider: Decider
    active: Tensor
    """`[batch, time]`, like `score`."""
    score: Tensor
    threshold: Tensor | float
    ctx: Context

    def updated(self, hidden: Tensor, state: Tensor) -> Tensor:
        """`hidden` plus each token's update. `state`: after the span if active, otherwise as skipping leaves it."""
        if self.carry == "none" and self.decider.weight(self.score) is None:
            return state  # if every token takes the span, this is bit-identical to the dense model
        return hidden + self._all(state - hidden)

    def updated_by_rows(self, hidden: Tensor, updates: Tensor, places: Tensor) -> Tensor:
        """The same in training, given the `updates` `[batch, k, d]` of the tokens at `places`, active ones first.

        They are smoothed as a shorter sequence, before they are spread to all tokens.
        """
        weight, keep = self._weights()
        if weight is not None:
            updates = weight.gather(1, places)[..., None].to(updates.dtype) * updates
        if self.carry == "smooth":
            updates = carry_on(updates, keep.gather(1, places))
        return hidden + self._trusted(carry_rows(updates, self.active))

    def _all(self, update: Tensor) -> Tensor:
        weight, keep = self._weights()
        if weight is not None:
            update = weight[..., None].to(update.dtype) * update
        if self.carry != "none":
            cache = self.ctx.cache
            last = None if cache is None else self.ctx.state("span update", like=update[0, 0])
            update = carry_on(update, keep, last)
            self.ctx.remember("span update", update)
        return self._trusted(update)

    def _weights(self) -> tuple[Tensor | None, Tensor]:
        """The weight of a token's own update (None: 1), and of what its predecessor got."""
        if self.carry != "smooth":
            return self.decider.weight(self.score), ~self.active
        assert self.ctx.positions is not None
        own = self.decider.probability(self.score, self.threshold)
        weight = torch.where(self.ctx.positions == 0, 1.0, own) * self.active
        return weight, 1 - weight

    def _trusted(self, update: Tensor) -> Tensor:
        if not (isinstance(self.decider, Boundary) and self.decider.training):
            return update
        return update * self.decider.confidence(self.score, self.active)[..., None].to(update.dtype)
