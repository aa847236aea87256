"""What travels through a forward pass: `Context`, shared by all layers, and `Rows`, the tokens one layer works on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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
    """How one forward pass runs; the same for every layer. `LanguageModel` makes it."""

    execution: Execution = "soft"
    cache: KVCache | None = None
    valid: Tensor | None = None
    """`[batch, time]`, False at padding."""
    ids: Tensor | None = None
    """`[batch, time]`: the tokens, for methods that decide by what they are."""
    decisions: Tensor | None = None
    """`[routed site, batch, time]` bool, True = active: replaces the routers' decisions under hard and sparse."""
    given_thresholds: Tensor | None = None
    """`[routed site]`, or `[routed site, batch, time]`: replaces the routers' own thresholds."""
    targets: Tensor | None = None
    """`[batch, time]` next tokens while training, for methods with losses of their own on what they predict."""
    counted: Tensor | None = None
    """`[batch, time]`: over which tokens losses are taken; None: all that are no padding."""
    teacher: Tensor | None = None
    """`[batch, time, vocabulary]` logits of the model that this one is to be like, while training with a teacher."""
    room: int = 0
    """How many rows to make of tokens that are packed, where that must be known beforehand; never fewer than there are.
    0: as many as there are."""
    scored: tuple[Tensor, Tensor] | None = None
    """States and scores of the tokens at a span, where `Method.until_decided` found them before this pass."""
    readout: Callable[[Tensor], Tensor] | None = None
    """Hidden states to logits: final norm and head."""
    layer: int | None = None
    """The cache layer of this application of a shared block; None where every block has its own."""
    positions: Tensor | None = None
    """`[time]` or `[batch, time]`: the tokens' positions in their sequences."""
    rotation: Rotation | None = None
    """Cosines and sines of the tokens' rotary positions."""
    columns: Tensor | None = None
    """`[batch, time]`: each token's place among the cached or given keys; None: the tokens are the last ones."""
    writes: Tensor | None = None
    """`[batch, time]`: the column of the cache that each token's key is written to."""
    window: int = 0
    """Number of cache columns that attention reads."""
    varlen: Varlen | None = None
    """For rows `[n, d]` of concatenated sequences: which sequence each belongs to."""

    def thresholds(self, own: Sequence[Tensor | float]) -> Sequence[Tensor | float]:
        """The thresholds that scores must exceed: the given ones, else each router's own."""
        given = self.given_thresholds if self.decisions is None else forced(self.decisions)
        return own if given is None else given.unbind()

    def key_count(self, time: int) -> int:
        """Keys each query attends over."""
        return self.window if self.cache else time

    def remember(self, name: int | str, values: Tensor) -> None:
        """Where there is a cache, keep what is to be remembered after each token, `[batch, time, ...]`."""
        if self.cache is not None:
            assert self.writes is not None
            self.cache.remember(name, values, self.writes)

    def spare(self, h: Tensor) -> Tensor:
        """A copy of h for a block that may overwrite it, where h itself is needed afterwards."""
        return h.clone() if self.execution == "sparse" else h

    def real(self, active: Tensor) -> Tensor:
        """`active` `[..., batch, time]` without padding."""
        return active if self.valid is None else active & self.valid

    def mean(self, values: Tensor) -> Tensor:
        """Over batch and time, the last two dimensions, of the tokens that losses are taken over."""
        counted = self.valid if self.counted is None else self.counted
        if counted is None:
            return values.mean((-2, -1))
        return (values * counted).sum((-2, -1)) / counted.sum().clamp(min=1)

    def packed(self, places: Tensor, there: Tensor | None = None) -> "Context":
        """The context of the tokens at `places` `[batch, k]`, taken out as a shorter sequence.

        there: `[batch, k]`, False where a place is unused and counts as padding; None: all are used.
        """
        valid = there if self.valid is None else self.valid.gather(1, places)
        if valid is not None and there is not None:
            valid = valid & there
        counted = None if self.counted is None else self.counted.gather(1, places)
        if counted is not None and there is not None:
            counted = counted & there
        rotation = self.rotation
        if rotation is not None:
            cos, sin = (part.expand(len(places), -1, -1) for part in rotation)
            index = places[..., None].expand(-1, -1, cos.shape[-1])
            rotation = cos.gather(1, index), sin.gather(1, index)
        return replace(self, valid=valid, counted=counted, rotation=rotation, columns=places)

    def gathered(
        self, active: Tensor, places: Tensor, columns: Tensor, lengths: Tensor, *, spare: bool = False
    ) -> "Context":
        """The context of the active tokens alone, at `places`, as the rows `[n, d]` of concatenated sequences.

        columns: `[batch, time]`, a token's index among the active tokens of its sequence, `lengths` `[batch]` so far.
        spare: there may be more places than active tokens; the rest make a sequence of their own, which nobody reads.
        """
        starts, time = F.pad(active.sum(1).cumsum(0), (1, 0)), active.shape[1]
        if spare:
            starts = F.pad(starts.clamp(max=len(places)), (0, 1), value=len(places))
            lengths = starts.diff()
        varlen = Varlen(starts.int(), lengths, places // time, take(columns, places), time)
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
    """The router's decision, where a router made it."""
    inputs: BlockInputs | None = None
    """What deciding already computed of the block."""
    chosen: ChosenRows | None = None
    """While training: the same tokens as a fixed number of rows, so that only they are computed."""

    @property
    def keep(self) -> Tensor:
        """`[batch, time]`: `sigmoid(-logit)` of the router, which scales an active token's updates."""
        assert self.decision is not None
        return self.decision.kept()

    def listed(self, h: Tensor) -> Listed | None:
        """The list of active tokens that kernels use; None where none run."""
        made = self.decision and self.decision.listed
        return made or list_active(self.active, h)
