"""What travels through a forward pass: `Context`, the same for every layer, and `Rows`, who is worked on in one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokendepth.cache import KVCache
from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.decide import Decision, list_active
from tokendepth.ops.rows import ChosenRows, Listed, take
from tokendepth.ops.sparse_block import Rotation
from tokendepth.ops.varlen_attention import Varlen
from tokendepth.trace import Execution


def forced(decisions: Tensor) -> Tensor:
    """Decisions as thresholds of -inf and inf, which keep the router alive: torch.compile would drop it."""
    return torch.where(decisions, -math.inf, math.inf)


@dataclass(frozen=True)
class Context:
    """How one forward pass is to run; the same for every layer of it. `LanguageModel` makes one."""

    execution: Execution = "soft"
    cache: KVCache | None = None
    valid: Tensor | None = None
    """`[batch, time]`, False at padding."""
    ids: Tensor | None = None
    """`[batch, time]`: the tokens, for methods that decide by what they are."""
    decisions: Tensor | None = None
    """`[routed site, batch, time]` bool, True = active: taken instead of the router's own, under hard and sparse."""
    given_thresholds: Tensor | None = None
    """`[routed site]`, or `[routed site, batch, time]`: taken instead of the routers' own."""
    targets: Tensor | None = None
    """`[batch, time]` next tokens while training, for methods with losses of their own on what they predict."""
    teacher: Tensor | None = None
    """`[batch, time, vocabulary]` logits of the model that this one is to be like, while training with a teacher."""
    readout: Callable[[Tensor], Tensor] | None = None
    """Hidden states to logits: final norm and head."""
    layer: int | None = None
    """Which of the cache's layers an application of a shared block is; none for a block of its own."""
    positions: Tensor | None = None
    """`[time]` or `[batch, time]`: where the tokens stand in their sequences."""
    rotation: Rotation | None = None
    """Cosines and sines of the tokens' rotary positions."""
    columns: Tensor | None = None
    """`[batch, time]`: where the tokens stand among keys that are cached or given; None: they are the last."""
    writes: Tensor | None = None
    """`[batch, time]`: the column of the cache that each token's key is written to."""
    window: int = 0
    """How many columns of the cache attention reads."""
    varlen: Varlen | None = None
    """Where the rows of all sequences follow one another, `[n, d]`: whose each is."""

    def thresholds(self, own: Sequence[Tensor | float]) -> Sequence[Tensor | float]:
        """What scores must exceed: what is given, else each router's own."""
        given = self.given_thresholds if self.decisions is None else forced(self.decisions)
        return own if given is None else given.unbind()

    def key_count(self, time: int) -> int:
        """Keys each query attends over."""
        return self.window if self.cache else time

    def spare(self, h: Tensor) -> Tensor:
        """A copy of h for a block that may overwrite it, where h itself is needed afterwards."""
        return h.clone() if self.execution == "sparse" else h

    def real(self, active: Tensor) -> Tensor:
        """Those of `active` `[..., batch, time]` that are no padding."""
        return active if self.valid is None else active & self.valid

    def mean(self, values: Tensor) -> Tensor:
        """Over batch and time, the last two dimensions, padding left out."""
        if self.valid is None:
            return values.mean((-2, -1))
        return (values * self.valid).sum((-2, -1)) / self.valid.sum()

    def packed(self, places: Tensor, there: Tensor | None = None) -> "Context":
        """The context of the tokens at `places` `[batch, k]`, taken out as a shorter sequence.

        there: `[batch, k]`, False where a place is left over and counts as padding; None: all are taken.
        """
        valid = there if self.valid is None else self.valid.gather(1, places)
        if valid is not None and there is not None:
            valid = valid & there
        rotation = self.rotation
        if rotation is not None:
            cos, sin = (part.expand(len(places), -1, -1) for part in rotation)
            index = places[..., None].expand(-1, -1, cos.shape[-1])
            rotation = cos.gather(1, index), sin.gather(1, index)
        return replace(self, valid=valid, rotation=rotation, columns=places)

    def gathered(self, active: Tensor, places: Tensor, columns: Tensor, lengths: Tensor) -> "Context":
        """The context of the active tokens alone, listed by `places`, one sequence after the other: `[n, d]`.

        columns: `[batch, time]`, where they stand among those of their sequence, which are `lengths` `[batch]` by now.
        """
        varlen = Varlen(active.sum(1), lengths, places // active.shape[1], take(columns, places))
        rotation = self.rotation
        if rotation is not None:
            cos, sin = (take(part.expand(len(active), -1, -1), places) for part in rotation)
            rotation = cos, sin
        return replace(self, valid=None, rotation=rotation, varlen=varlen)

    def twice(self) -> "Context":
        """The context of the batch followed by a copy of itself; for training."""
        assert self.cache is None
        if self.valid is None:
            return self
        cos_sin = self.rotation and (self.rotation[0].repeat(2, 1, 1), self.rotation[1].repeat(2, 1, 1))
        return replace(self, valid=self.valid.repeat(2, 1), rotation=cos_sin)


@dataclass(frozen=True)
class Rows:
    """Which tokens a block works on; the others pass it unchanged."""

    active: Tensor
    """`[batch, time]`, bool."""
    decision: Decision | None = None
    """How that was decided, where a router did."""
    inputs: BlockInputs | None = None
    """What was computed of the block on the way to the decision."""
    chosen: ChosenRows | None = None
    """While training: the same tokens as rows of a known number, so that only they are computed."""

    @property
    def keep(self) -> Tensor:
        """`[batch, time]`: `sigmoid(-logit)` of the router, what an active token keeps of its updates."""
        assert self.decision is not None
        return self.decision.kept()

    def listed(self, h: Tensor) -> Listed | None:
        """The list of active tokens, where kernels work by it."""
        made = self.decision and self.decision.listed
        return made or list_active(self.active, h)
