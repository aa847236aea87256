"""Requests to the engine, and the tokens generated for them with their cost."""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from torch import Tensor

from tokendepth.infer.drafting import Speculation
from tokendepth.infer.sampling import Choice, Sampler
from tokendepth.infer.stopping import ShownText
from tokendepth.trace import DepthTotals, DepthTrace

Reason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """A generated token and its cost."""

    choice: Choice
    """Its id and log-probability, a `Choice`."""
    text: str
    """What it adds to the text; empty while a character, or a possible stop string, is incomplete."""
    trace: DepthTrace
    """`DepthTrace` of the positions computed for it, `[site, 1, position]`: its predecessor, or a whole prompt."""
    seconds: float
    """Its share of the time of its step, in which all running requests advance."""
    extra_flops: float = 0.0
    """FLOPs not in `trace`: drafts, and drafted tokens that were rejected."""

    @property
    def depth(self) -> list[float]:
        """Work at each site, at the position that predicted the token."""
        return self.trace.work[:, 0, -1].tolist()

    @property
    def active_fraction(self) -> float:
        """Share of the routed sites that processed the position that predicted the token."""
        return self._totals().active_fraction

    @property
    def flops_share(self) -> float:
        """FLOPs at that position, relative to the same blocks with nothing skipped and no routers."""
        return 1 - self._totals().flops_skipped

    def _totals(self) -> DepthTotals:
        return replace(self.trace, work=self.trace.work[:, :, -1:]).totals()


@dataclass(eq=False)
class Request:
    """A prompt to continue. `Engine.submit` makes one and fills in `tokens` and `reason` during generation."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    rolls: bool
    thresholds: Tensor | None
    sampler: Sampler
    shown: ShownText
    tokens: list[Token] = field(default_factory=list)
    reason: Reason | None = None
    """Why it ended: a stop string or token, the token limit or a full context, or cancellation."""
    ids: list[int] = field(default_factory=list)
    """The prompt followed by the generated tokens."""
    cached: int = 0
    """How many of `ids` are in its slot of the cache."""
    speculation: Speculation | None = None
    """With a `SpeculativeEngine`: its drafting statistics so far."""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Found(NamedTuple):
    """A token chosen for a request in a step."""

    request: Request
    choice: Choice
    trace: DepthTrace
    """Trace of the positions read for it."""
    extra_flops: float = 0.0


def on_host(trace: DepthTrace) -> DepthTrace:
    fewer = None if trace.fewer_keys is None else trace.fewer_keys.cpu().numpy()
    return replace(trace, work=trace.work.float().cpu().numpy(), fewer_keys=fewer)


def columns_of(trace: DepthTrace, row: int, begin: int, end: int) -> DepthTrace:
    """The trace of the tokens `begin` to `end` of one sequence, none of them padding."""
    fewer = None if trace.fewer_keys is None else trace.fewer_keys[:, row : row + 1]
    return replace(trace, work=trace.work[:, row : row + 1, begin:end], valid=None, fewer_keys=fewer)
