"""The targets for routing on the bytes of enwik8, and the results; a target that was missed stays in the table."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

from paper import spans
from paper.comparison import table, wrapped
from paper.contenders import DECIDERS
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
"""Targets: by how much the best routed model should beat dense models with the same executed FLOPs, by scale."""
FASTER, KEPT = 1.15, 0.6
"""Targets relative to dense models with the same loss: speed, and size of the KV cache."""
LITTLE = 0.01
"""Target: train until doubling the steps gains the dense model less than this."""
TRIED = {
    "wide": (
        "**Width 512.** Twice the steps leave the difference where it is. Blocks of another width within the span "
        "lose quality at width 256 ([below](#span-with-a-different-inner-width)). Not tried at width 512: taught "
        "boundaries, dense models of twelve layers, longer training."
    ),
    "few": (
        "**A forward pass on a GPU with few sequences.** However few tokens take the span, its blocks are launched, "
        "and a dense model with the same loss has fewer blocks in all. Kernels that work on listed rows are about as "
        "fast as rows packed into one matrix; a kernel for the attention of packed rows, and outer blocks by library "
        "calls, did not help enough. Log: *three seeds of everything*, *a span is packed on the H200*."
    ),
    "many": (
        "**A forward pass on a GPU with many sequences.** With listed rows it took longer than dense models of the "
        "same loss; with tokens packed once for the whole span, in two CUDA graphs, it takes less time, but on "
        "average not enough. Log: *three seeds, and a span beats dense models*, *a span is packed on the H200*, *the "
        "gap grows with training*."
    ),
    "kept": (
        "**Keys and values.** The blocks outside the span keep those of every token, and these alone are about what "
        "the target allows. A longer span with as many FLOPs stores as much; wider blocks in the span have a higher "
        "loss. Not tried: long training with deeper dense models to compare with. Log: *three seeds of everything*."
    ),
}
"""What was tried for targets that were missed."""
MANY = 64
"""Sequences that keep a GPU busy."""
CONTROLS = ("thin", "switch")
"""Not routed in depth: the first is dense, the second has the same cost for every token."""

Verdict = Literal["yes", "no", "yes, on average", "no, on average", "no clear difference", "open", ""]
"""On average: seeds differ. Open: the result is a bound that does not decide it. Empty: not run, or no target."""


@dataclass(frozen=True)
class Target:
    words: str
    target: str
    result: str
    met: Verdict = ""
    tried: str = ""
    """Of TRIED, if the target is missed."""

    def cells(self) -> list[str]:
        return [self.words, self.target, self.result, self.met]


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
        f"Loss rows are for the best routed model with three seeds, speed rows for {DECIDERS['rule']}. A speed of "
        f"{FASTER:g}x: dense models with the same loss, trained for as many steps, take {FASTER:g} times as long. `>` "
        "or `<`: no dense model has such a low loss, so the comparison is with the best one. `on average`: some seeds "
        "meet the target and others do not."
    )
    rows = [target.cells() for target in found]
    missed = dict.fromkeys(target.tried for target in found if target.tried and target.met in ("no", "no, on average"))
    tried = [wrapped(f"- {TRIED[name]}") for name in missed]
    parts = [f"{wrapped(words)}\n", table(["", "target", "result", "met"], rows)]
    return "\n".join([*parts, *(["### Missed, and what was tried\n", *tried, ""] if tried else [])])


def _met(found: float, by_seed: Iterable[float], most: float) -> Verdict:
    """Whether `found` is at most `most`; no seed: they cannot be told apart, so nothing is known of single ones."""
    seeds = [(seed <= most) == (found <= most) for seed in by_seed]
    agree = all(seeds) and bool(seeds)
    if found <= most:
        return "yes" if agree else "yes, on average"
    return "no" if agree else "no, on average"


def _seeded(models: Models) -> list[Setting]:
    """Routed models with enough seeds."""
    routed = [entry.setting for entry in models.routed() if entry.setting.method not in CONTROLS]
    return [setting for setting in routed if len(models.found.executed(setting)) >= SEEDS]


def _differences(models: Models, among: Sequence[str] = ()) -> dict[Setting, dict[int, float]]:
    """Relative to dense models with the same executed FLOPs, by seed."""
    found = {}
    for setting in _seeded(models):
        against = models.found.beside(setting) if not among or setting.method in among else None
        seeds = [one.seed for one in models.found.executed(setting)]
        if isinstance(against, tuple) and len(seeds) == len(against[1].values):
            found[setting] = dict(zip(seeds, against[1].values, strict=True))
    return found


def _best(found: dict[Setting, dict[int, float]]) -> Setting:
    return min(found, key=lambda setting: mean(found[setting].values()))


def _better(models: Models, gain: float) -> Target:
    dense = [one for one in models.made if one.setting.method == "dense" and models.found.executed(one.setting)]
    against = "dense models, same FLOPs"
    if len(dense) == 1:
        against = f"dense, {dense[0].config.model.n_layer} layers"
    found, asked = _differences(models), f"{-gain:+.0%}"
    if not found:
        return Target(f"loss vs. {against}, {models.scale}", asked, NOT_RUN)
    best = _best(found)
    if len(dense) == 1:
        against += f" ({_flops_vs(models, dense[0].setting, best)})"
    words = f"loss vs. {against}, {models.scale}"
    gap = Stat(tuple(found[best].values()))
    tried = "wide" if models.found.configs[best].model.d_model > spans.BASE.width else ""
    return Target(words, asked, f"{gap.text('+.2%')} ({best.title})", _met(gap.mean, gap.values, -gain), tried)


def _flops_vs(models: Models, dense: Setting, routed: Setting) -> str:
    """How many more or fewer FLOPs the dense model executes."""
    theirs, mine = (models.found.stat(one, "flops_per_token") for one in (dense, routed))
    assert theirs is not None
    assert mine is not None
    more = theirs.mean / mine.mean - 1
    return f"{abs(more):.1%} {'more' if more > 0 else 'fewer'} FLOPs"


def _thin(models: Models) -> Target:
    """A control without a target: a dense model can spend the same FLOPs on more layers, too."""
    words = "loss vs. a thinner, deeper dense model"
    found = _differences(models)
    thin = next((e.setting for e in models.routed() if e.setting.method == "thin"), None)
    if thin is None or not found:
        return Target(f"{words}, {models.scale}", DASH, NOT_RUN)
    best = _best(found)
    words += f" ({_flops_vs(models, thin, best)}), {models.scale}"
    mine, theirs = ({one.seed: one.loss for one in models.found.executed(setting)} for setting in (best, thin))
    gap = Stat(tuple(loss / theirs[seed] - 1 for seed, loss in mine.items() if seed in theirs))
    return Target(words, DASH, f"{gap.text('+.2%')} ({best.title} vs. {thin.title})")


def _learned(models: Models) -> Target:
    """Each relative to dense models of its own cost, so that the one that costs more has no advantage."""
    words = f"learned decision vs. word ends, each relative to dense models with the same FLOPs, {models.scale}"
    rule = next(iter(_differences(models, (spans.RULE,)).values()), {})
    names = [e.setting.method for e in models.made if e.setting.method.startswith("span_")]
    learned = _differences(models, [name for name in names if name not in (spans.RULE, "span_dice")])
    if not rule or not learned:
        return Target(words, "no worse", NOT_RUN)
    best = _best(learned)
    gap = Stat(tuple(mine - rule[seed] for seed, mine in learned[best].items() if seed in rule))
    met = "yes" if gap.mean <= 0 else "no clear difference" if gap.mean <= 2 * (gap.std or 0.0) else "no"
    return Target(words, "no worse", f"{gap.text('+.2%')} ({best.title})", met)


def _trained_enough(results: Path, *, quick: bool) -> Target:
    """The doublings from which on all gain little; if there are none, the last one."""
    words = "gain of the 6-layer dense model from doubling the steps, width 256, context 256"
    target, doubled = f"less than {LITTLE:.0%}", spans.doublings(results, spans.lengths(), quick=quick)
    if not doubled:
        return Target(words, target, NOT_RUN)
    little = list(itertools.takewhile(lambda one: -one.test.mean < LITTLE, reversed(doubled)))
    first, *later = little[::-1] or doubled[-1:]
    result = "; ".join(
        f"{_gain(one.test)} from {one.steps:,}{'' if one.test.std else ' (one seed)'}, {_gain(one.validation)} on "
        "validation text"
        for one in (first, *later)
    )
    return Target(words, target, result, _met(-first.test.mean, [-seed for seed in first.test.values], LITTLE))


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
                met = _met(ratio.value, ratio.by_seed, 1 / FASTER)
                met = "open" if ratio.bound and met == "no" else met
                tried = "" if device.startswith("CPU") else "many" if batch >= MANY else "few"
                found.append(Target(where, f"{FASTER:g}x", ratio.speedup_by_seed, met, tried))
    return found or [Target(words, f"{FASTER:g}x", NOT_RUN)]


def _sooner(scales: Sequence[Models], results: Path) -> list[Target]:
    """Without a target."""
    words = "speed of training to span's final loss"
    found = [
        Target(f"{words}, {device}, {scale}", DASH, OUTSIDE if ratio == OUTSIDE else ratio.speedup_by_seed)
        for device, times in step_times(results).items()
        for scale, ratio in _times_of_the_rule(scales, times)
    ]
    return found or [Target(words, DASH, NOT_RUN)]


def _times_of_the_rule(scales: Sequence[Models], times: Times) -> Iterator[tuple[str, Ratio | Literal["outside"]]]:
    """Relative to dense models with the same loss, at each scale at which it was timed."""
    for models in scales:
        for entry in models.routed():
            if entry.setting.method == spans.RULE and entry.setting in _seeded(models):
                ratio = models.time(entry, times)
                if ratio is not None:
                    yield models.scale, ratio


def _kept(scales: Sequence[Models]) -> Target:
    words, found = "keys and values stored at equal loss, relative to dense models", []
    for models in scales:
        for entry in models.routed():
            ratio = models.keys_and_values(entry) if entry.setting in _seeded(models) else None
            if isinstance(ratio, Ratio):
                found.append((ratio.value, f"{ratio} ({entry.setting.title}, {models.scale})", ratio))
    if not found:
        return Target(words, f"{KEPT:g}", NOT_RUN)
    value, result, ratio = min(found, key=lambda one: one[:2])
    met = _met(value, ratio.by_seed, KEPT)
    return Target(words, f"{KEPT:g}", result, "open" if ratio.bound and met == "no" else met, "kept")
