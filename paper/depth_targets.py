"""What was wanted of routing on enwik8's bytes, beside what came out; a target that was missed stays in the table."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

from paper import spans
from paper.comparison import table, wrapped
from paper.depth import SEEDS, Times, step_times
from paper.equal_loss import Models, Ratio, all_models, pass_times
from paper.evidence import NOT_RUN
from paper.outcomes import OUTSIDE
from paper.settings import Setting
from tokendepth.report.summary import DASH, Stat

BETTER = {
    spans.BASE.title: 0.01,
    spans.SEVEN_TIMES.title: 0.01,
    spans.FOURTEEN_TIMES.title: 0.01,
    "width 512": 0.02,
    "width 512, 8,000 steps": 0.02,
}
"""By how much the best routed model was to beat dense models of its executed FLOPs, by scale."""
FASTER, KEPT = 1.15, 0.6
"""Than dense models of its loss; and the share of their keys and values."""
LITTLE = 0.01
"""Training was to go on until twice the steps gain the dense model less than this."""
CONTROLS = ("thin", "switch")
"""Not routed in depth: one is dense, and the other spends the same on every token."""

Verdict = Literal["yes", "no", "yes, in the mean", "no, in the mean", "even", "open", ""]
"""In the mean: seeds differ. Even: not told apart. Open: what was found is a bound that does not decide it. Empty: not
run, or nothing was wanted."""


@dataclass(frozen=True)
class Target:
    words: str
    wanted: str
    found: str
    reached: Verdict = ""

    def cells(self) -> list[str]:
        return [self.words, self.wanted, self.found, self.reached]


def targets(results: Path, *, quick: bool = False) -> str:
    scales = all_models(results, quick=quick)
    found = [_better(models, BETTER[models.scale]) for models in scales if models.scale in BETTER]
    found += [
        _thin(scales[0]),
        _learned(scales[0]),
        _trained_enough(results, quick=quick),
        *_faster(scales, results),
        *_sooner(scales, results),
        _kept(scales),
    ]
    words = (
        "Rows of loss are of the best routed model with three seeds, rows of speed of the span by a rule, at each "
        "scale and batch size. `>` or `<`: no dense model that was trained has as low a loss, so the best of them "
        f"stands for it. A speed of {FASTER:g}x: dense models of the same loss, trained for as many steps, take "
        f"{FASTER:g} times as long. `in the mean`: by some seeds it is reached, by others not. What was tried where a "
        "target was missed is in the [log](LOG.md)."
    )
    rows = [target.cells() for target in found]
    return f"{wrapped(words)}\n\n{table(['', 'wanted', 'found', 'reached'], rows)}"


def _reached(found: float, by_seed: Iterable[float], most: float) -> Verdict:
    """Whether it is `most` or less."""
    agree = all((seed <= most) == (found <= most) for seed in by_seed)
    if found <= most:
        return "yes" if agree else "yes, in the mean"
    return "no" if agree else "no, in the mean"


def _seeded(models: Models) -> list[Setting]:
    """Routed models with enough seeds."""
    routed = [entry.setting for entry in models.routed() if entry.setting.method not in CONTROLS]
    return [setting for setting in routed if len(models.found.executed(setting)) >= SEEDS]


def _differences(models: Models, among: Sequence[str] = ()) -> dict[Setting, dict[int, float]]:
    """To dense models of the same executed FLOPs, by seed."""
    found = {}
    for setting in _seeded(models):
        against = models.found.beside(setting) if not among or setting.method in among else None
        seeds = [one.seed for one in models.found.executed(setting)]
        if isinstance(against, tuple) and len(seeds) == len(against[1].values):
            found[setting] = dict(zip(seeds, against[1].values, strict=True))
    return found


def _best(found: dict[Setting, dict[int, float]]) -> Setting:
    return min(found, key=lambda setting: mean(found[setting].values()))


def _better(models: Models, wanted: float) -> Target:
    dense = [one for one in models.made if one.setting.method == "dense" and models.found.executed(one.setting)]
    beside = "dense models of the same executed FLOPs"
    if len(dense) == 1:
        beside = f"{dense[0].config.model.n_layer} dense layers alone, of nearly the same executed FLOPs"
    words = f"loss against {beside}, {models.scale}"
    found, asked = _differences(models), f"{-wanted:+.0%}"
    if not found:
        return Target(words, asked, NOT_RUN)
    best = _best(found)
    gap = Stat(tuple(found[best].values()))
    return Target(words, asked, f"{gap.text('+.2%')} ({best.title})", _reached(gap.mean, gap.values, -wanted))


def _thin(models: Models) -> Target:
    """No target but a control: a dense model may spend the same FLOPs on more layers, too."""
    words = "the best routed model against a dense one that is thinner and deeper, of nearly the same FLOPs"
    words = f"{words}, {models.scale}"
    found = _differences(models)
    thin = next((e.setting for e in models.routed() if e.setting.method == "thin"), None)
    if thin is None or not found:
        return Target(words, DASH, NOT_RUN)
    best = _best(found)
    mine, theirs = ({one.seed: one.loss for one in models.found.executed(setting)} for setting in (best, thin))
    gap = Stat(tuple(loss / theirs[seed] - 1 for seed, loss in mine.items() if seed in theirs))
    return Target(words, DASH, f"{gap.text('+.2%')} ({best.title} and {thin.title})")


def _learned(models: Models) -> Target:
    """Each beside dense models of its own cost, so that the one that costs more has no advantage."""
    words = f"a learned decision against the rule, each beside dense models of its cost, {models.scale}"
    rule = next(iter(_differences(models, (spans.RULE,)).values()), {})
    names = [e.setting.method for e in models.made if e.setting.method.startswith("span_")]
    learned = _differences(models, [name for name in names if name not in (spans.RULE, "span_dice")])
    if not rule or not learned:
        return Target(words, "no worse", NOT_RUN)
    best = _best(learned)
    gap = Stat(tuple(mine - rule[seed] for seed, mine in learned[best].items() if seed in rule))
    reached = "yes" if gap.mean <= 0 else "even" if gap.mean <= 2 * (gap.std or 0.0) else "no"
    return Target(words, "no worse", f"{gap.text('+.2%')} ({best.title})", reached)


def _trained_enough(results: Path, *, quick: bool) -> Target:
    """The doublings that gain little; if there is none, the last."""
    words = "what twice the steps gain the dense model with six layers, width 256, context 256"
    wanted, doubled = f"less than {LITTLE:.0%}", spans.doublings(results, quick=quick)
    if not doubled:
        return Target(words, wanted, NOT_RUN)
    first, *later = [one for one in doubled if -one.test.mean < LITTLE] or doubled[-1:]
    said = "; ".join(
        f"{_gain(one.test)} from {one.steps:,}{'' if one.test.std else ' (one seed)'}, {_gain(one.validation)} on "
        "validation text"
        for one in (first, *later)
    )
    return Target(words, wanted, said, _reached(-first.test.mean, [-seed for seed in first.test.values], LITTLE))


def _gain(change: Stat) -> str:
    return Stat(tuple(-value for value in change.values)).text(".2%")


def _faster(scales: Sequence[Models], results: Path) -> list[Target]:
    words, found = "speed of a forward pass at equal loss", []
    for (device, batch), times in pass_times(results).items():
        for scale, ratio in _times_of_the_rule(scales, times):
            where = f"{words}, {device}, batch {batch}, {scale}"
            if ratio == OUTSIDE:
                found.append(Target(where, f"{FASTER:g}x", OUTSIDE, "no"))
            else:
                reached = _reached(ratio.value, ratio.by_seed, 1 / FASTER)
                reached = "open" if ratio.bound and reached == "no" else reached
                found.append(Target(where, f"{FASTER:g}x", ratio.speedup_by_seed, reached))
    return found or [Target(words, f"{FASTER:g}x", NOT_RUN)]


def _sooner(scales: Sequence[Models], results: Path) -> list[Target]:
    """No target was set for it."""
    words = "speed of training to the loss that the span ends with"
    found = [
        Target(f"{words}, {device}, {scale}", DASH, OUTSIDE if ratio == OUTSIDE else ratio.speedup_by_seed)
        for device, times in step_times(results).items()
        for scale, ratio in _times_of_the_rule(scales, times)
    ]
    return found or [Target(words, DASH, NOT_RUN)]


def _times_of_the_rule(scales: Sequence[Models], times: Times) -> Iterator[tuple[str, Ratio | Literal["outside"]]]:
    """Beside dense models of its loss, by scale, wherever it was timed."""
    for models in scales:
        for entry in models.routed():
            if entry.setting.method == spans.RULE and entry.setting in _seeded(models):
                ratio = models.time(entry, times)
                if ratio is not None:
                    yield models.scale, ratio


def _kept(scales: Sequence[Models]) -> Target:
    words, found = "keys and values in the cache at its loss", []
    for models in scales:
        for entry in models.routed():
            ratio = models.keys_and_values(entry) if entry.setting in _seeded(models) else None
            if isinstance(ratio, Ratio):
                found.append((ratio.value, f"{ratio} ({entry.setting.title}, {models.scale})", ratio))
    if not found:
        return Target(words, f"{KEPT:g}", NOT_RUN)
    value, said, ratio = min(found, key=lambda one: one[:2])
    reached = _reached(value, ratio.by_seed, KEPT)
    return Target(words, f"{KEPT:g}", said, "open" if ratio.bound and reached == "no" else reached)
