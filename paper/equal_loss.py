"""The cost of running a model, relative to dense models with the same loss: time and KV cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paper import spans
from paper.depth import PASSES, Entry, Times, device_of, outcomes
from paper.grid import same_work
from paper.outcomes import OUTSIDE, Executed, Outcomes, interpolate
from paper.settings import SAME_FLOPS, Setting
from tokendepth.config import from_dict
from tokendepth.report.summary import DASH
from tokendepth.runs.results import rows_so_far

Place = tuple[str, int]
"""A device and a batch size."""
DRAWN = "drawn"
"""In a row of a forward pass: the decisions were random, not those of the model."""
Costs = Callable[[Setting], float | None]


@dataclass(frozen=True)
class Ratio:
    """A cost relative to dense models with the same loss."""

    value: float
    bound: bool = False
    """No dense model has such a low loss. This is relative to the best of them; a model that good would cost more."""
    by_seed: tuple[float, ...] = ()
    """Each seed relative to its own dense models; empty if that is not known. One number if it is of all seeds."""

    def __str__(self) -> str:
        return f"{'<' if self.bound else ''}{self.value:.2f}"

    @property
    def speedup(self) -> str:
        return f"{'>' if self.bound else ''}{1 / self.value:.2f}x"

    @property
    def speedup_by_seed(self) -> str:
        """With the lowest and the highest over the seeds."""
        if len(self.by_seed) < 2:
            return self.speedup
        return f"{self.speedup} ({1 / max(self.by_seed):.2f} to {1 / min(self.by_seed):.2f}x by seed)"


def pass_times(results: Path) -> dict[Place, Times]:
    found: dict[Place, Times] = {}
    for row in rows_so_far(results / PASSES):
        place = device_of(row), row["batch"]
        found.setdefault(place, {})[same_work(from_dict(row["config"]))] = row["pass_ms"][0]
    return dict(sorted(found.items()))


def drawn_decisions(results: Path, *, quick: bool = False) -> list[str]:
    """Titles of the models that were timed with random decisions; rows may hold older ones."""
    titles = {same_work(one.config): one.setting.title for m in all_models(results, quick=quick) for one in m.made}
    drawn = [from_dict(row["config"]) for row in rows_so_far(results / PASSES) if row.get("decided") == DRAWN]
    return sorted({titles[work] for config in drawn if (work := same_work(config)) in titles})


def at_its_loss(found: Outcomes, entry: Entry, made: list[Entry], cost: Costs) -> Ratio | Literal["outside"] | None:
    """Its cost relative to dense models with the same loss; outside if all of them have a lower loss.

    None if a cost is not known, or if all have a higher loss and the best of them costs no more.
    """
    loss, mine = found.stat(entry.setting, "loss"), cost(entry.setting)
    dense = [one.setting for one in made if one.setting.method == "dense"]
    heights = {setting: height.mean for setting in dense if (height := found.stat(setting, "loss"))}
    line = sorted((height, theirs) for one, height in heights.items() if (theirs := cost(one)) is not None)
    if mine is None or loss is None or not line:
        return None
    if loss.mean < line[0][0]:
        best = min(heights, key=heights.__getitem__)
        if line[0][0] != heights[best] or not _costs_more(found, best, entry.setting):
            return None
        value = mine / line[0][1]
        return Ratio(value, bound=True, by_seed=(value,) if _always_better(found, entry, dense) else ())
    reached = interpolate(line, loss.mean, beyond=0.0)
    if reached == OUTSIDE:
        return OUTSIDE
    theirs = [_of_its_seed(found, one, dense, cost) for one in found.executed(entry.setting)]
    by_seed = () if OUTSIDE in theirs else tuple(mine / float(each) for each in theirs)
    return Ratio(mine / float(reached), by_seed=by_seed)


def _always_better(found: Outcomes, entry: Entry, dense: list[Setting]) -> bool:
    """Whether every seed has a lower loss than the dense models with that seed."""
    best: dict[int, float] = {}
    for one in (one for setting in dense for one in found.executed(setting)):
        best[one.seed] = min(one.loss, best.get(one.seed, one.loss))
    return all(one.loss < best.get(one.seed, 0.0) for one in found.executed(entry.setting))


def _of_its_seed(found: Outcomes, one: Executed, dense: list[Setting], cost: Costs) -> float | str:
    """The cost of dense models with that seed and loss."""
    losses = {setting: other.loss for setting in dense for other in found.executed(setting) if other.seed == one.seed}
    line = sorted((loss, theirs) for setting, loss in losses.items() if (theirs := cost(setting)) is not None)
    return interpolate(line, one.loss, beyond=0.0) if line else OUTSIDE


def _costs_more(found: Outcomes, dense: Setting, setting: Setting) -> bool:
    """Otherwise the bound says nothing new: a lower loss at the same FLOPs is reported elsewhere."""
    theirs, mine = (found.stat(one, "flops_per_token") for one in (dense, setting))
    return theirs is not None and mine is not None and theirs.mean > (1 + SAME_FLOPS) * mine.mean


@dataclass(frozen=True)
class Models:
    """The models of one scale and their outcomes."""

    scale: str
    found: Outcomes
    made: list[Entry]

    def routed(self) -> Iterator[Entry]:
        """Everything that is compared with dense models and has run."""
        for entry in self.made:
            if entry.setting.method != "dense" and self.found.stat(entry.setting, "loss") is not None:
                yield entry

    def keys_and_values(self, entry: Entry) -> Ratio | Literal["outside"] | None:
        def kept(setting: Setting) -> float | None:
            stored = self.found.stat(setting, "kv_bytes")
            return None if stored is None else stored.mean

        return at_its_loss(self.found, entry, self.made, kept)

    def time(self, entry: Entry, times: Times) -> Ratio | Literal["outside"] | None:
        """Relative time per forward pass, or of training, since all models of a scale take the same number of steps."""
        costs = {one.setting: times.get(same_work(one.config)) for one in self.made}
        return at_its_loss(self.found, entry, self.made, costs.get)


def all_models(results: Path, *, quick: bool = False) -> list[Models]:
    """The first scale, with every contender, and then the others."""
    first = Models(spans.BASE.title, *outcomes(results, quick=quick))
    return [first, *(Models(one.title, *spans.outcomes_at(results, one, quick=quick)) for one in spans.SCALES[1:])]


def shown(ratio: Ratio | str | None) -> str:
    return DASH if ratio is None else str(ratio)


def speed(ratio: Ratio | str | None) -> str:
    """Of a ratio of times."""
    return ratio.speedup if isinstance(ratio, Ratio) else shown(ratio)
