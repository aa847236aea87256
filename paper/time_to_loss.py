"""How many steps a dense model needs to reach the loss of span routing, and how long that takes on every device.

A dense model has a loss at every number of steps that it was trained for; in between, the loss is interpolated linearly
in the logarithm of the steps. Losses are means over the seeds that span and both of those training runs share.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Literal

from paper import spans
from paper.comparison import table, wrapped
from paper.contenders import DECIDERS
from paper.depth import Times, step_times
from paper.equal_loss import all_models
from paper.evidence import NOT_RUN
from paper.grid import same_work
from paper.outcomes import interpolate
from tokendepth.report.summary import DASH

Bound = Literal["", "<", ">"]
"""Reached before the end of its shortest training run; not reached in its longest."""


@dataclass(frozen=True)
class Line:
    """One model and its losses: by number of training steps, the fewest first, then by seed."""

    title: str
    method: str
    work: str
    losses: dict[int, dict[int, float]]


@dataclass(frozen=True)
class Reached:
    """A length of span's training, and the steps that a dense model needs to reach the same loss."""

    span: Line
    length: int
    loss: float
    seeds: int
    dense: Line
    steps: float
    bound: Bound
    by_seed: tuple[tuple[float, Bound], ...]
    """The steps of each seed, the fewest first."""

    def shown_steps(self) -> str:
        return self._with_range(lambda steps: f"{steps:,.0f}")

    def speed(self, times: Times) -> str:
        """Of span's training: the dense model's time over span's, if both were timed."""
        mine, theirs = (times.get(line.work) for line in (self.span, self.dense))
        if mine is None or theirs is None:
            return DASH
        return self._with_range(lambda steps: f"{steps * theirs / (self.length * mine):.2f}x")

    def _with_range(self, shown: Callable[[float], str]) -> str:
        on_average, *seeds = (f"{bound}{shown(steps)}" for steps, bound in ((self.steps, self.bound), *self.by_seed))
        return on_average if set(seeds) == {on_average} else f"{on_average} ({seeds[0]} to {seeds[-1]} by seed)"


def lines(results: Path, *, quick: bool = False) -> list[Line]:
    """Dense models, those with fewer layers first, and span at word ends."""
    steps, found = {scale.title: scale.steps for scale in spans.lengths()}, dict[str, tuple[int, Line]]()
    models = [models for models in all_models(results, quick=quick) if models.scale in steps]
    for one in sorted(models, key=lambda models: steps[models.scale]):
        for entry in one.made:
            title, method, ran = entry.setting.title, entry.setting.method, one.found.executed(entry.setting)
            if ran and method in ("dense", spans.RULE):
                new = Line(title, method, same_work(entry.config), {})
                _, line = found.setdefault(title, (entry.config.model.n_layer, new))
                line.losses[steps[one.scale]] = {seed.seed: seed.loss for seed in ran}
    by_layers = sorted(found.values(), key=lambda one: (one[1].method == spans.RULE, one[0]))
    return [line for _, line in by_layers]


def reached(found: list[Line]) -> Iterator[Reached]:
    """For every length of span's training, all dense models that allow a comparison."""
    for span in (line for line in found if line.method == spans.RULE):
        for length in span.losses:
            for dense in (line for line in found if line.method == "dense"):
                one = _reached(span, length, dense)
                if one and (one.bound != ">" or one.steps > length):  # else it was not trained long enough
                    yield one


def _reached(span: Line, length: int, dense: Line) -> Reached | None:
    """Over all seeds shared by the two lengths around the loss, found with the seeds that all lengths share."""
    found = _by_shared_seeds(span, length, dense, dense.losses)
    if found is None or found.bound:
        return found
    around = [max(n for n in dense.losses if n <= found.steps), min(n for n in dense.losses if n >= found.steps)]
    closer = _by_shared_seeds(span, length, dense, around)
    return closer if closer and not closer.bound else found


def _by_shared_seeds(span: Line, length: int, dense: Line, lengths: Iterable[int]) -> Reached | None:
    losses, among = span.losses[length], {steps: dense.losses[steps] for steps in lengths}
    if not (seeds := set(losses).intersection(*among.values())):
        return None
    loss = mean(losses[seed] for seed in seeds)
    curve = {steps: mean(by_seed[seed] for seed in seeds) for steps, by_seed in among.items()}
    by_seed = sorted(
        (steps_to(losses[seed], {n: one[seed] for n, one in dense.losses.items() if seed in one}) for seed in seeds),
        key=lambda one: (one[1] == ">", one[1] != "<", one[0]),
    )
    return Reached(span, length, loss, len(seeds), dense, *steps_to(loss, curve), tuple(by_seed))


def steps_to(loss: float, curve: dict[int, float]) -> tuple[float, Bound]:
    """Interpolated on the losses of a dense model by steps."""
    shortest, longest = min(curve), max(curve)
    if loss >= curve[shortest]:
        return shortest, "<"
    if loss < curve[longest]:
        return longest, ">"
    line = sorted((height, math.log(steps)) for steps, height in curve.items())
    return min(longest, math.exp(float(interpolate(line, loss, beyond=0.0)))), ""  # rounding could pass the longest


def section(results: Path, *, quick: bool = False) -> str:
    trained, devices = lines(results, quick=quick), step_times(results)
    found = list(reached(trained))
    if not found:
        return f"{NOT_RUN}\n"
    words = (
        f"How long a dense model must train to reach the loss that {DECIDERS['rule']} has after a given number of "
        "steps, relative to span's training time (steps times time per step): at 1.20x span is there 1.20 times as "
        "fast. Losses are averaged over the n seeds with which both models were trained; in brackets the lowest and "
        "highest of these seeds. Between two lengths of its training, a dense model's loss is interpolated "
        "linearly in the logarithm of the steps. That makes its time a little too long, since losses fall faster at "
        "first. `>`: not reached in its longest training run. `<`: reached before the end of its shortest, so that the "
        "speed is at most this. Only models that were trained that long are compared."
    )
    rows = []
    for one in found:
        told = [one.speed(times) for times in devices.values()]
        cells = [one.dense.title, one.shown_steps(), *told]
        rows.append([f"{one.length:,}", f"{one.loss:.4f} (n={one.seeds})", *cells])
    about = ["steps of span", "loss of span", "dense model", "its steps to that loss"]
    titles = [*about, *(f"speed of span, {device}" for device in devices)]
    return "\n".join([f"{wrapped(words)}\n", table(titles, rows), *_if_deeper(trained, devices)])


def _if_deeper(found: list[Line], devices: Mapping[str, Times]) -> list[str]:
    """How deeper dense models would compare, if they stayed as far below six layers as after their longest training."""
    six, span = (
        next((line for line in found if name in (line.title, line.method)), None)
        for name in (spans.DENSE_SIX.title, spans.RULE)
    )
    if six is None or span is None:
        return []
    rows = []
    for dense in found[found.index(six) + 1 :]:
        if dense is not span and (both := six.losses.keys() & dense.losses.keys()):
            last = max(both)
            seeds = six.losses[last].keys() & dense.losses[last].keys()
            ratio = mean(dense.losses[last][seed] / six.losses[last][seed] for seed in seeds)
            losses = {
                n: {seed: ratio * loss for seed, loss in one.items()} for n, one in six.losses.items() if n >= last
            }
            about = f"{dense.title}, {1 - ratio:.1%} below six layers, as after {last:,} steps (n={len(seeds)})"
            needed = (_reached(span, length, replace(dense, losses=losses)) for length in span.losses if length > last)
            rows += [
                [about, f"{one.length:,}", *(one.speed(times) for times in devices.values())] for one in needed if one
            ]
    if not rows:
        return []
    words = (
        "Deeper dense models were not trained for as long, and might need less time. This table guesses: it assumes "
        "that they stay as far below six layers as after their longest training. If that distance grows with "
        "training, span does worse than the table says; if it shrinks, better."
    )
    titles = ["guessed", "steps of span", *(f"speed of span, {device}" for device in devices)]
    return [f"{wrapped(words)}\n", table(titles, rows)]
