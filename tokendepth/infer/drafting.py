"""The arithmetic of self-speculation: which drafted tokens are kept, what drafting costs, how many to draft next.

A drafted token is kept with chance a if those before it were. Of d drafted tokens, and the one that the verifying pass
adds, 1 + a + ... + a^d are kept on average. Drafting one costs c, verifying all d + 1 in one pass v, both as multiples
of a plain step:

    speedup = (1 - a^(d+1)) / (1 - a) / (d c + v)

Cost is, first, the weights that a pass reads, routers, keys, values and head included: they are known from the trace.
Where every token takes every block, v is 1: one pass reads every weight once. Where blocks are skipped, d + 1 tokens
together need more of them than one. How much longer such passes take than their weights say depends on the machine: a
`Pace`, which is measured once, so that drafting stops where it does not pay by the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokendepth.infer.sampling import Sampler, draw, probabilities
from tokendepth.trace import Site

FIRST, LONGEST = 4, 8
"""Drafted tokens: of the first draft where nothing is known of its cost, and of any."""
FIRST_GUESS, GUESS_WEIGHT = 0.8, 2.0
"""The acceptance that is expected at first, and how many tokens that guess counts for."""
REMEMBERED = 0.9
"""What earlier tokens count for after another pass, where the length of the next draft is chosen."""
TRIED, SHORTEST_PAUSE, LONGEST_PAUSE = 2, 32, 256
"""Where drafts do not pay: steps without them, doubled each time, until so many tokens are drafted to try again."""


def speedup(acceptance: float, length: float, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Over plain decoding, of drafts of `length` tokens; costs as multiples of a plain step.

    >>> round(speedup(0.9, 6, 0.25), 2)
    2.09
    """
    powers = length + 1 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
    return powers / (length * draft_cost + verify_cost)


@dataclass(frozen=True)
class Pace:
    """How much longer passes take on a machine, as multiples of a plain step, than the weights that they read say."""

    draft: float = 1.0
    verify: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """Drafted tokens that are verified, in rising order, and the factor of each."""
    works: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """The share of each site that a draft and a plain step worked on where this was measured: a request goes by them
    until it has drafted itself."""

    def verifying(self, length: float) -> float:
        """Linear between what is known, flat beyond it."""
        lengths, factors = zip(*self.verify, strict=True)
        return float(np.interp(length, lengths, factors))


class Speculation:
    """What drafting has come to in one request, and how many tokens to draft next."""

    def __init__(self, sites: Sequence[Site], outside: float, pace: Pace | None = None) -> None:
        """sites: for no keys, so that their FLOPs count weights alone; outside: those of the head; pace: by default,
        costs are the weights."""
        self.pace = pace or Pace()
        self.drafted = self.accepted = self.judged = self.passes = 0
        """Tokens: drafted; kept; kept or the first of their draft to be rejected. Passes that verified a draft."""
        self._fixed = outside + sum(site.always + site.router + site.active * (not site.routed) for site in sites)
        self._routed = np.array([site.active * site.routed for site in sites])
        self._draft_work, self._full_work, self._read = np.zeros(len(sites)), np.zeros(len(sites)), 0
        self._recent = FIRST_GUESS * GUESS_WEIGHT, GUESS_WEIGHT
        self._left, self._pause, self._trying = 0, SHORTEST_PAUSE, False

    # -- what is known

    @property
    def acceptance(self) -> float:
        """The chance that a drafted token is kept if those before it were."""
        return self.accepted / self.judged if self.judged else 0.0

    @property
    def length(self) -> float:
        """Of a draft, on average."""
        return self.drafted / self.passes if self.passes else 0.0

    @property
    def draft_cost(self) -> float:
        """Weights that drafting a token reads, as a multiple of those of a plain step."""
        return self.weights(self._mean_draft) / self.weights(self._mean_work)

    def verify_cost(self, length: float) -> float:
        """The same of verifying `length` tokens and one more, if tokens skip independently of each other."""
        return self.weights(1 - (1 - self._mean_work) ** (length + 1)) / self.weights(self._mean_work)

    @property
    def expected_speedup(self) -> float:
        """Of the drafts so far over plain decoding, by the formula above, at the acceptance and costs so far."""
        return self._pays(self.acceptance, self.length)

    def summary(self) -> str:
        if not self.passes:
            return "nothing was drafted"
        return (
            f"{self.drafted} tokens drafted, {self.accepted} kept in {self.passes} passes: acceptance "
            f"{self.acceptance:.3f}, draft cost {self.draft_cost:.3f}; by the formula these steps were "
            f"{self.expected_speedup:.2f} times as fast as plain ones"
        )

    def weights(self, work: np.ndarray) -> float:
        """That a pass reads, times two; work: `[site]`, the share of it that is worked on."""
        return self._fixed + float(self._routed @ work)

    @property
    def _mean_draft(self) -> np.ndarray:
        if not self.passes and self.pace.works:
            return np.array(self.pace.works[0])
        return self._draft_work / max(1, self.drafted)

    @property
    def _mean_work(self) -> np.ndarray:
        if not self.passes and self.pace.works:
            return np.array(self.pace.works[1])
        return self._full_work / max(1, self._read)

    # -- what is done

    def next_length(self, room: int) -> int:
        """How many tokens to draft in this step, `room` at most: what pays best at the acceptance of late."""
        if room < 1:
            return 0
        if self._left:
            self._left -= 1
            return 0
        if self._trying:
            self._trying = False
            return min(TRIED, room)
        if not self.passes and self.pace.works is None:
            return min(FIRST, room)
        accepted, judged = self._recent
        best = max(range(LONGEST + 1), key=lambda length: self._pays(accepted / judged, length))
        if best:
            self._pause = SHORTEST_PAUSE
            return min(best, room)
        self._left, self._pause, self._trying = self._pause - 1, min(2 * self._pause, LONGEST_PAUSE), True
        self._recent = GUESS_WEIGHT * accepted / judged, GUESS_WEIGHT  # so that the next trial counts
        return 0

    def _pays(self, acceptance: float, length: float) -> float:
        """The speedup of drafts of `length` tokens here; 0 tokens are a plain step."""
        if not length:
            return 1.0
        draft, verify = self.pace.draft * self.draft_cost, self.pace.verifying(length) * self.verify_cost(length)
        return speedup(acceptance, length, draft, verify)

    def record(self, accepted: int, draft_work: np.ndarray, full_work: np.ndarray) -> None:
        """A draft, of which `accepted` tokens were kept: work `[site, drafted]`, and `[site, drafted + 1]` verified."""
        drafted = draft_work.shape[1]
        judged = min(drafted, accepted + 1)
        self.drafted, self.accepted, self.judged = (
            self.drafted + drafted,
            self.accepted + accepted,
            self.judged + judged,
        )
        self.passes += 1
        self._draft_work += draft_work.sum(1)
        self._full_work += full_work.sum(1)
        self._read += drafted + 1
        self._recent = REMEMBERED * self._recent[0] + accepted, REMEMBERED * self._recent[1] + judged


# --- which tokens are kept --------------------------------------------------------------------------------------------


def verdict(logits: Tensor, drafted: Tensor, odds: Sequence[Tensor], sampler: Sampler) -> Tensor:
    """How many of the tokens `drafted` `[d]` are kept, and the token after them: `[2]`.

    logits: `[d + 1, vocabulary]`, of the verifying pass; odds: what each drafted token was drawn from, if any was.
    """
    imagined, rows = sampler.imagined(), []
    for place, row in enumerate(logits):
        rows.append(imagined.adjusted(row))
        imagined.note(drafted[place : place + 1])
    adjusted, count = torch.stack(rows), len(drafted)
    if not sampler.sampling.temperature:
        best = adjusted.argmax(-1)
        kept = (best[:count] == drafted).long().cumprod(0).sum(0, keepdim=True)
        return torch.cat([kept, best.index_select(0, kept)])
    full = probabilities(adjusted, [sampler.sampling] * len(adjusted)).double()
    draft = torch.stack([row.double() for row in odds]) if count else full[:0]
    numbers = torch.tensor([sampler.draw() for _ in range(count + 1)], dtype=torch.float64, device=logits.device)
    chances = keep_chance(full[:count], draft).gather(1, drafted[:, None])[:, 0]
    kept = (numbers[:count] < chances).long().cumprod(0).sum(0, keepdim=True)
    left = torch.cat([instead(full[:count], draft), full[count:]])
    return torch.cat([kept, draw(left.index_select(0, kept), numbers[count:])])


def keep_chance(full: Tensor, draft: Tensor) -> Tensor:
    """The chance to keep each token that was drawn from `draft` where `full` is wanted; both `[n, vocabulary]`.

    With `instead` for those that are not kept, tokens are distributed as if they were drawn from `full`.
    """
    return (full / draft.clamp(min=torch.finfo(draft.dtype).tiny)).clamp(max=1)


def instead(full: Tensor, draft: Tensor) -> Tensor:
    """What a token is drawn from where the drafted one was not kept, up to a factor for each row."""
    missing = (full - draft).clamp(min=0)
    return torch.where(missing.sum(-1, keepdim=True) > 0, missing, full)  # nothing is missing but for rounding
