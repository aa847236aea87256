"""The arguments of a forward pass: `Context`, shared by all layers, and `Rows`, the tokens that one block processes."""

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
    """Decisions as thresholds of -inf and inf. With plain masks, torch.compile would drop the unused router."""
    return torch.where(decisions, -math.inf, math.inf)


@dataclass(frozen=True)
class Context:
    """How one forward pass runs; the same for every layer. Created by `LanguageModel`."""

    execution: Execution = "soft"
    cache: KVCache | None = None
    valid: Tensor | None = None
    """`[batch, time]`, False at padding."""
    ids: Tensor | None = None
    """`[batch, time]`: token ids, for methods that decide by them."""
    decisions: Tensor | None = None
    """`[routed site, batch, time]` bool, True = active: replaces routers' decisions in hard and sparse execution."""
    given_thresholds: Tensor | None = None
    """`[routed site]`, or `[routed site, batch, time]`: replaces the routers' own thresholds."""
    targets: Tensor | None = None
    """`[batch, time]`: next tokens, given in training, for methods with prediction losses of their own."""
    counted: Tensor | None = None
    """`[batch, time]`: the tokens that losses are averaged over; None: all except padding."""
    teacher: Tensor | None = None
    """`[batch, time, vocabulary]`: logits of the teacher, when training with one."""
    room: int = 0
    """Number of rows for packed tokens, if shapes must be known beforehand; at least the number of active tokens.
    0: exactly that number."""
    scored: tuple[Tensor, Tensor] | None = None
    """States and scores of the tokens at a span, if `Method.until_decided` has already computed them."""
    span: int = 0
    """For methods with several spans: the number of the one that runs, whose states are its own."""
    readout: Callable[[Tensor], Tensor] | None = None
    """Hidden states to logits: final norm and head."""
    layer: int | None = None
    """The cache layer for this application of a shared block; None: the block's own."""
    positions: Tensor | None = None
    """`[time]` or `[batch, time]`: the tokens' positions in their sequences."""
    rotation: Rotation | None = None
    """Cosines and sines of the tokens' rotary positions."""
    columns: Tensor | None = None
    """`[batch, time]`: each token's index among the cached or given keys; None: the tokens are the last keys."""
    writes: Tensor | None = None
    """`[batch, time]`: the cache column to which each token's key and value are written."""
    window: int = 0
    """Number of cache columns that attention reads."""
    varlen: Varlen | None = None
    """For rows `[n, d]` of concatenated sequences: which sequence each row belongs to."""

    def thresholds(self, own: Sequence[Tensor | float]) -> Sequence[Tensor | float]:
        """The thresholds that scores must exceed: the given ones, otherwise each router's own."""
        given = self.given_thresholds if self.decisions is None else forced(self.decisions)
        return own if given is None else given.unbind()

    def key_count(self, time: int) -> int:
        """Number of keys that each query attends to."""
        return self.window if self.cache else time

    def state(self, name: int | str, *, like: Tensor) -> Tensor:
        """A method's state in the cache, as `KVCache.state`."""
        assert self.cache is not None
        return self.cache.state(self._named(name), like=like)

    def remember(self, name: int | str, values: Tensor) -> None:
        """Store a method's state after each token, `[batch, time, ...]`, in the cache, if there is one."""
        if self.cache is not None:
            assert self.writes is not None
            self.cache.remember(self._named(name), values, self.writes)

    def _named(self, name: int | str) -> int | str:
        return f"{name} {self.span}" if self.span else name

    def spare(self, h: Tensor) -> Tensor:
        """h, copied if the next block may overwrite it (sparse execution); for callers that still need h."""
        return h.clone() if self.execution == "sparse" else h

    def real(self, active: Tensor) -> Tensor:
        """`active` `[..., batch, time]`, False at padding."""
        return active if self.valid is None else active & self.valid

    def mean(self, values: Tensor) -> Tensor:
        """Mean over batch and time, the last two dimensions, of the tokens that losses are averaged over."""
        counted = self.valid if self.counted is None else self.counted
        if counted is None:
            return values.mean((-2, -1))
        return (values * counted).sum((-2, -1)) / counted.sum().clamp(min=1)

    def packed(self, places: Tensor, there: Tensor | None = None) -> "Context":
        """The context for the tokens at `places` `[batch, k]`, gathered into a shorter sequence.

        there: `[batch, k]`, False for unused places, which are treated as padding; None: all are used.
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
        """The context for only the active tokens, at `places`, as rows `[n, d]` of concatenated sequences.

        columns: `[batch, time]`, a token's index among the active tokens of its sequence. lengths: `[batch]`, the
        number of active tokens so far. spare: there may be more places than active tokens; the extra rows form a
        sequence of their own, which is ignored.
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
        """The context for the batch concatenated with a copy of itself; training only."""
        assert self.cache is None
        if self.valid is None:
            return self
        cos_sin = self.rotation and (self.rotation[0].repeat(2, 1, 1), self.rotation[1].repeat(2, 1, 1))
        return replace(self, valid=self.valid.repeat(2, 1), rotation=cos_sin)


@dataclass(frozen=True)
class Rows:
    """Which tokens a block processes; the others skip it."""

    active: Tensor
    """`[batch, time]`, bool."""
    decision: Decision | None = None
    """The router's decision; None if no router made it."""
    inputs: BlockInputs | None = None
    """Parts of the block that were computed along with the decision."""
    chosen: ChosenRows | None = None
    """In training: the same tokens as a fixed number of rows, so that only they are computed."""

    @property
    def keep(self) -> Tensor:
        """`[batch, time]`: the router's `sigmoid(-logit)`, which scales the updates of active tokens."""
        assert self.decision is not None
        return self.decision.kept()

    def listed(self, h: Tensor) -> Listed | None:
        """The list of active tokens for kernels; None if none will run."""
        made = self.decision and self.decision.listed
        return made or list_active(self.active, h)
