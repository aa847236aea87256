"""How long a dense model trains to the loss that span routing reaches: steps, and times of steps on every device.

Models of one depth at several lengths of training are a line: between two lengths a loss falls evenly with the
logarithm of the steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paper import spans
from paper.comparison import table, wrapped
from paper.depth import step_times
from paper.equal_loss import Ratio
from paper.evidence import NOT_RUN, show
from paper.grid import same_work
from tokendepth.report.summary import DASH, Stat

Times = dict[str, float]
"""Milliseconds of a step by what is computed."""


@dataclass(frozen=True)
class Length:
    """What came out of one length of training."""

    steps: int
    loss: Stat


@dataclass(frozen=True)
class Line:
    """One model at all lengths of training that it has, the shortest first."""

    title: str
    method: str
    work: str
    lengths: list[Length]


@dataclass(frozen=True)
class Reached:
    """A length of the span's training, and the steps that a dense model takes to the same loss."""

    span: Line
    length: Length
    dense: Line
    steps: float
    bound: bool
    """It did not get there in so many."""

    def ratio(self, times: Times) -> Ratio | None:
        """The span's time over the dense model's, where both were timed."""
        mine, theirs = (times.get(line.work) for line in (self.span, self.dense))
        if mine is None or theirs is None:
            return None
        return Ratio(self.length.steps * mine / (self.steps * theirs), self.bound)


def lines(results: Path, *, quick: bool = False) -> list[Line]:
    """Dense models and the span by a rule, those of fewer layers first."""
    found: dict[str, Line] = {}
    for scale in spans.lengths():
        outcomes, made = spans.outcomes_at(results, scale, quick=quick)
        for entry in made:
            loss = outcomes.stat(entry.setting, "loss")
            if loss is not None and entry.setting.method in ("dense", spans.RULE):
                title, method = entry.setting.title, entry.setting.method
                line = found.setdefault(title, Line(title, method, same_work(entry.config), []))
                line.lengths.append(Length(scale.steps, loss))
    return sorted(found.values(), key=lambda line: -line.lengths[0].loss.mean)


def steps_to(loss: float, line: Line) -> float | None:
    """None: it was there before its shortest length, or was not with its longest."""
    for before, after in pairwise(line.lengths):
        high, low = before.loss.mean, after.loss.mean
        if low <= loss <= high:
            done = (high - loss) / (high - low)
            return math.exp(math.log(before.steps) + done * math.log(after.steps / before.steps))
    return None


def reached(found: list[Line]) -> Iterator[Reached]:
    """For every length of the span each dense model that tells something: it got there, or it did not in more steps."""
    for span in (line for line in found if line.method == spans.RULE):
        for length in span.lengths:
            for dense in (line for line in found if line.method == "dense"):
                steps, last = steps_to(length.loss.mean, dense), dense.lengths[-1]
                if steps is not None:
                    yield Reached(span, length, dense, steps, bound=False)
                elif last.steps > length.steps and last.loss.mean > length.loss.mean:
                    yield Reached(span, length, dense, last.steps, bound=True)


def beside_the_fastest(found: list[Reached], times: Times) -> dict[Length, tuple[Line, Ratio]]:
    """For every length of the span the dense model that is soonest at its loss; where none is, that with the bound."""
    best: dict[Length, tuple[Line, Ratio]] = {}
    for one in found:
        ratio = one.ratio(times)
        if ratio is not None and (one.length not in best or _sooner(ratio, best[one.length][1])):
            best[one.length] = one.dense, ratio
    return best


def _sooner(ratio: Ratio, other: Ratio) -> bool:
    """Whether a dense model leaves the span less of an advantage; of mere bounds the highest tells most."""
    if ratio.bound != other.bound:
        return other.bound
    return (ratio.value > other.value) != ratio.bound


def section(results: Path, *, quick: bool = False) -> str:
    found, devices = list(reached(lines(results, quick=quick))), step_times(results)
    if not found:
        return f"{NOT_RUN}\n"
    words = (
        "How long a dense model trains to the loss that the span by a rule has after so many steps, as a multiple of "
        "the span's time: steps times the time of a step on each device. Between two lengths of its training a dense "
        "model's loss falls evenly with the logarithm of the steps; `>`: it was not there after its longest. Only "
        "models that were trained long enough to tell stand here, so beside the longest trainings deeper dense models "
        "are missing, which may be faster than six layers are."
    )
    rows = []
    for one in found:
        steps = f"{'>' if one.bound else ''}{one.steps:,.0f}"
        ratios = [one.ratio(times) for times in devices.values()]
        told = [DASH if ratio is None else ratio.speedup for ratio in ratios]
        rows.append([f"{one.length.steps:,}", show(one.length.loss), one.dense.title, steps, *told])
    titles = ["span, steps", "its loss", "beside", "steps to that loss", *(f"time, {device}" for device in devices)]
    return f"{wrapped(words)}\n\n{table(titles, rows)}"
