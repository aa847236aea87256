"""What the engine writes: requests, their tokens, and what each token took."""

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
    """One generated token, and what it took."""

    choice: Choice
    text: str
    """What it adds to the text that is shown; nothing while a character or what may be a stop string is not whole."""
    trace: DepthTrace
    """Of the positions that were computed for it, `[site, 1, position]`: its predecessor, or a whole prompt."""
    seconds: float
    """Its share of the step that made it, in which every other running request advanced too."""
    extra_flops: float = 0.0
    """Executed beside those of `trace`: drafts, and drafted tokens that were rejected."""

    @property
    def depth(self) -> list[float]:
        """The work of each site at the position that predicted it."""
        return self.trace.work[:, 0, -1].tolist()

    @property
    def active_fraction(self) -> float:
        """Of the routed sites, how many worked at the position that predicted it."""
        return self._totals().active_fraction

    @property
    def flops_share(self) -> float:
        """FLOPs at that position, as a share of those of the same blocks with nothing skipped and no routers."""
        return 1 - self._totals().flops_skipped

    def _totals(self) -> DepthTotals:
        return replace(self.trace, work=self.trace.work[:, :, -1:]).totals()


@dataclass(eq=False)
class Request:
    """A prompt to be continued. `Engine.submit` makes one; `tokens` and `reason` are filled in as it is written."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    rolls: bool
    thresholds: Tensor | None
    sampler: Sampler
    shown: ShownText
    tokens: list[Token] = field(default_factory=list)
    reason: Reason | None = None
    """Why it ended: a stop string or token, as many tokens as were asked for or as fit, or it was cancelled."""
    ids: list[int] = field(default_factory=list)
    """The prompt and what was generated."""
    cached: int = 0
    """How many of them its slot holds."""
    speculation: Speculation | None = None
    """Of a `SpeculativeEngine`: what drafting has come to so far."""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Found(NamedTuple):
    """A token that a step found for a request."""

    request: Request
    choice: Choice
    trace: DepthTrace
    """Of the columns that were read for it."""
    extra_flops: float = 0.0


def on_host(trace: DepthTrace) -> DepthTrace:
    fewer = None if trace.fewer_keys is None else trace.fewer_keys.cpu().numpy()
    return replace(trace, work=trace.work.float().cpu().numpy(), fewer_keys=fewer)


def columns_of(trace: DepthTrace, row: int, begin: int, end: int) -> DepthTrace:
    """The trace of some tokens of one sequence, none of them padding."""
    fewer = None if trace.fewer_keys is None else trace.fewer_keys[row : row + 1]
    return replace(trace, work=trace.work[:, row : row + 1, begin:end], valid=None, fewer_keys=fewer)
