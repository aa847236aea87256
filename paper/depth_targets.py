"""What was wanted of routing on enwik8's bytes, beside what came out; a target that was missed stays in the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paper import spans
from paper.comparison import table, wrapped
from paper.depth import SEEDS
from paper.equal_loss import Models, all_models, pass_times
from paper.evidence import NOT_RUN
from paper.settings import Setting
from tokendepth.report.summary import DASH, Stat

BETTER = {spans.BASE.title: 0.01, "width 512": 0.02}
"""By how much the best routed model was to beat dense models of its executed FLOPs, by scale."""
FASTER, KEPT = 1.15, 0.6
"""Than dense models of its loss; and the share of their keys and values."""
CONTROLS = ("thin", "switch")
"""Not routed in depth: one is dense, and the other spends the same on every token."""


@dataclass(frozen=True)
class Target:
    words: str
    wanted: str
    found: str
    reached: bool | None = None
    """None: not run."""

    def cells(self) -> list[str]:
        return [self.words, self.wanted, self.found, "" if self.reached is None else "yes" if self.reached else "no"]


def targets(results: Path, *, quick: bool = False) -> str:
    scales = all_models(results, quick=quick)
    found = [_better(models, BETTER[models.scale]) for models in scales if models.scale in BETTER]
    found += [_thin(scales[0]), _learned(scales[0]), *_faster(scales, results), _kept(scales)]
    words = (
        "The best of all routed models, by its mean over three seeds; of several scales or batch sizes each stands for "
        "itself. `>`: no dense model that was trained loses as little, so this is beside the best of them. What was "
        "tried where a target was missed is in the [log](LOG.md)."
    )
    rows = [target.cells() for target in found]
    return f"{wrapped(words)}\n\n{table(['', 'wanted', 'found', 'reached'], rows)}"


def _differences(models: Models, among: Sequence[str] = ()) -> dict[Setting, Stat]:
    """To dense models of the same executed FLOPs, of routed models with enough seeds."""
    found = {}
    for entry in models.routed():
        setting = entry.setting
        if setting.method not in CONTROLS and (not among or setting.method in among):
            against = models.found.beside(setting)
            if isinstance(against, tuple) and len(against[1].values) >= SEEDS:
                found[setting] = against[1]
    return found


def _better(models: Models, wanted: float) -> Target:
    words = f"loss against dense models of the same executed FLOPs, {models.scale}"
    found, asked = _differences(models), f"{-wanted:+.0%}"
    if not found:
        return Target(words, asked, NOT_RUN)
    best = min(found, key=lambda setting: found[setting].mean)
    return Target(words, asked, f"{found[best].text('+.2%')} ({best.title})", found[best].mean <= -wanted)


def _thin(models: Models) -> Target:
    """No target but a control: a dense model may spend the same FLOPs on more layers, too."""
    words = "the best routed model against a dense one that is thinner and deeper, of nearly the same FLOPs"
    found = _differences(models)
    thin = next((e.setting for e in models.routed() if e.setting.method == "thin"), None)
    if thin is None or not found:
        return Target(words, DASH, NOT_RUN)
    best = min(found, key=lambda setting: found[setting].mean)
    mine, theirs = ({one.seed: one.loss for one in models.found.executed(setting)} for setting in (best, thin))
    gap = Stat(tuple(loss / theirs[seed] - 1 for seed, loss in mine.items() if seed in theirs))
    return Target(words, DASH, f"{gap.text('+.2%')} ({best.title} and {thin.title})")


def _learned(models: Models) -> Target:
    """Each beside dense models of its own cost, so that the one that costs more has no advantage."""
    words = "a learned decision against the rule, each beside dense models of its cost"
    rule = next(iter(_differences(models, (spans.RULE,)).values()), None)
    names = [e.setting.method for e in models.made if e.setting.method.startswith("span_")]
    learned = _differences(models, [name for name in names if name not in (spans.RULE, "span_dice")])
    if rule is None or not learned:
        return Target(words, "no worse", NOT_RUN)
    best = min(learned, key=lambda setting: learned[setting].mean)
    gap = Stat(tuple(mine - other for mine, other in zip(learned[best].values, rule.values, strict=True)))
    return Target(words, "no worse", f"{gap.text('+.2%')} ({best.title})", gap.mean <= 2 * (gap.std or 0.0))


def _faster(scales: Sequence[Models], results: Path) -> list[Target]:
    """The span by a rule wherever it was timed: whatever does better in loss is of its kind."""
    timed, found = pass_times(results), []
    places = sorted({place for times in timed.values() for place in times})
    for device, batch in places:
        for models in scales:
            for entry in models.routed():
                ratio = models.time(entry, timed, (device, batch)) if entry.setting.method == spans.RULE else None
                if ratio is not None and not isinstance(ratio, str):
                    words = f"time of a pass at its loss, {device}, batch {batch}, {models.scale}"
                    found.append(Target(words, f"{FASTER:g}x", ratio.speedup, 1 / ratio.value >= FASTER))
    return found or [Target("time of a pass at its loss", f"{FASTER:g}x", NOT_RUN)]


def _kept(scales: Sequence[Models]) -> Target:
    words, found = "keys and values in the cache at its loss", []
    for models in scales:
        for entry in models.routed():
            ratio = models.keys_and_values(entry) if entry.setting.method not in CONTROLS else None
            if ratio is not None and not isinstance(ratio, str):
                found.append((ratio.value, f"{ratio} ({entry.setting.title}, {models.scale})"))
    if not found:
        return Target(words, f"{KEPT:g}", NOT_RUN)
    value, said = min(found)
    return Target(words, f"{KEPT:g}", said, value <= KEPT)
