"""The arithmetic of self-speculation: which drafted tokens are kept, what drafting costs, how many to draft next.

A drafted token is kept with probability a if all drafted tokens before it were kept. With d drafted tokens and the one
that the verifying pass adds, a draft yields 1 + a + ... + a^d tokens on average. Drafting a token costs c, and
verifying all d + 1 in one pass costs v, both as multiples of a plain step:

    speedup = (1 - a^(d+1)) / (1 - a) / (d c + v)

The first estimate of a cost is the weights that a pass reads, including routers, keys, values and head; the trace gives
them. If every token takes every block, v is 1, since one pass reads every weight once. If blocks are skipped, d + 1
tokens together need more blocks than one token does. How much slower passes really are depends on the machine. It is
measured once as a `Pace`, so that drafting stops if it does not pay off in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokendepth.infer.sampling import Sampler, draw, probabilities
from tokendepth.trace import Site

FIRST, LONGEST = 4, 8
"""Tokens in a request's first draft if its cost is unknown, and the most in any draft."""
FIRST_GUESS, GUESS_WEIGHT = 0.8, 2.0
"""The acceptance assumed at first, and how many tokens this prior counts for."""
REMEMBERED = 0.9
"""Decay per pass of the weight of earlier tokens when the next draft's length is chosen."""
TRIED, SHORTEST_PAUSE, LONGEST_PAUSE = 2, 32, 256
"""If drafts do not pay off: tokens in a trial draft, and the shortest (then doubled) and longest pause before one, in
steps."""


def speedup(acceptance: float, length: float, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Speedup over plain decoding with drafts of `length` tokens; costs are multiples of a plain step.

    >>> round(speedup(0.9, 6, 0.25), 2)
    2.09
    """
    powers = length + 1 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
    return powers / (length * draft_cost + verify_cost)


@dataclass(frozen=True)
class Pace:
    """How much slower passes are on this machine than the weights they read suggest, relative to a plain step."""

    draft: float = 1.0
    verify: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """Pairs of drafted tokens verified in one pass, ascending, and the factor for it."""
    works: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Work at each site in a draft and in a plain step of this measurement: what a request assumes until it has made
    a draft itself."""

    def verifying(self, length: float) -> float:
        """Linear between the measured lengths, constant outside them."""
        lengths, factors = zip(*self.verify, strict=True)
        return float(np.interp(length, lengths, factors))


class Speculation:
    """One request's drafting statistics, and the length of its next draft."""

    def __init__(self, sites: Sequence[Site], outside: float, pace: Pace | None = None) -> None:
        """sites: at 0 keys, so that their FLOPs count only weights. outside: FLOPs of the head. pace: the default takes
        costs from the weights alone."""
        self.pace = pace or Pace()
        self.drafted = self.accepted = self.judged = self.passes = 0
        """Counts of tokens drafted, kept, and judged (kept, or the first rejected); and of verifying passes."""
        self._fixed = outside + sum(site.always + site.router + site.active * (not site.routed) for site in sites)
        self._routed = np.array([site.active * site.routed for site in sites])
        self._draft_work, self._full_work, self._read = np.zeros(len(sites)), np.zeros(len(sites)), 0
        self._recent = FIRST_GUESS * GUESS_WEIGHT, GUESS_WEIGHT
        self._left, self._pause, self._trying = 0, SHORTEST_PAUSE, False

    # -- statistics

    @property
    def acceptance(self) -> float:
        """Probability that a drafted token is kept if those before it were."""
        return self.accepted / self.judged if self.judged else 0.0

    @property
    def length(self) -> float:
        """Average tokens per draft."""
        return self.drafted / self.passes if self.passes else 0.0

    @property
    def draft_cost(self) -> float:
        """Weights read to draft one token, as a multiple of those of a plain step."""
        return self.weights(self._mean_draft) / self.weights(self._mean_work)

    def verify_cost(self, length: float) -> float:
        """The same for verifying `length` + 1 tokens, assuming that tokens skip independently of each other."""
        return self.weights(1 - (1 - self._mean_work) ** (length + 1)) / self.weights(self._mean_work)

    @property
    def expected_speedup(self) -> float:
        """Speedup of the drafts so far, by the formula above with the observed acceptance and costs."""
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
        """Twice the number of weights that a pass reads; work: `[site]`, the share of each that is computed."""
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

    # -- drafting

    def next_length(self, room: int) -> int:
        """How many tokens to draft in this step, at most `room`: the fastest choice at the recent acceptance."""
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
        self._recent = GUESS_WEIGHT * accepted / judged, GUESS_WEIGHT  # so that the next trial decides
        return 0

    def _pays(self, acceptance: float, length: float) -> float:
        """Expected speedup of drafts of `length` tokens; 0 is a plain step."""
        if not length:
            return 1.0
        draft, verify = self.pace.draft * self.draft_cost, self.pace.verifying(length) * self.verify_cost(length)
        return speedup(acceptance, length, draft, verify)

    def record(self, accepted: int, draft_work: np.ndarray, full_work: np.ndarray) -> None:
        """Count a draft with `accepted` kept tokens; work: `[site, drafted]`, and `[site, drafted + 1]` verifying."""
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
    """`[2]`: how many of the `drafted` `[d]` tokens are kept, and the token that follows them.

    logits: `[d + 1, vocabulary]` from the verifying pass. odds: the distribution of each drafted token, if sampled.
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
    """Probability of keeping each token drawn from `draft` when the target is `full`; both `[n, vocabulary]`.

    If rejected tokens are replaced by draws from `instead`, the tokens are distributed as if drawn from `full`.
    """
    return (full / draft.clamp(min=torch.finfo(draft.dtype).tiny)).clamp(max=1)


def instead(full: Tensor, draft: Tensor) -> Tensor:
    """The distribution (unnormalised) of the token that replaces a rejected one."""
    missing = (full - draft).clamp(min=0)
    return torch.where(missing.sum(-1, keepdim=True) > 0, missing, full)  # all zero only by rounding
