"""From the outcomes of a comparison to its picture; on a method's page, with that method alone in colour."""

import math
import re
from dataclasses import dataclass

from paper.outcomes import Cost, Outcomes
from paper.settings import Setting
from tokendepth.report.figures import Drawing
from tokendepth.report.palette import look
from tokendepth.report.plots import Points
from tokendepth.report.summary import Stat
from tokendepth.report.tradeoff import Place, tradeoff

NAMES = {
    "random": "random routing",
    "thin": "dense, thin and deep",
    "two_passes": "two passes, nothing skipped",
    "tsa": "TSA",
    "budget": "budget",
    "early_exit": "early exit",
    "mod": "MoD",
    "mor": "MoR",
    "act": "ACT",
    "itt": "ITT",
    "switch": "Switch",
    "span_rule": "span by a rule",
    "span_boundary": "span by learned boundaries",
    "span_taught": "span by boundaries, taught",
    "span_entropy": "span by entropy",
    "span_gain": "span by what skipping costs",
    "span_dice": "span by dice",
    "span_score": "span by a learned score",
}

SPAN_MARKERS = {
    "span_rule": "D",
    "span_boundary": "P",
    "span_taught": "s",
    "span_entropy": "*",
    "span_gain": "X",
    "span_score": "v",
    "span_dice": "+",
}
BEST_SPANS = ("span_rule", "span_taught")
"""In the picture of all methods, where seven marks of nearly the same FLOPs would cover each other."""
LINES = ("solid", "dashed", "dotted")
"""Of the models of one method that have a curve."""


@dataclass(frozen=True)
class Axis:
    """What losses are drawn over."""

    cost: Cost
    words: str
    label: str
    name: str = ""
    """Added to the figure's."""
    scale: float = 1.0
    """To what the label says, in millionths."""


EXECUTED = Axis(
    "flops_per_token", "executed FLOPs per token", "million FLOPs per token, executed (head and routers included)"
)
TRAINED = Axis(
    "training_flops", "training FLOPs per token", "million FLOPs per token, trained (forward and backward)", "training"
)


def timed_on(device: str) -> Axis:
    words = f"the time of a training step, {device}"
    name = re.sub("[^a-z0-9]+", "-", f"time {device}".lower())
    return Axis("step_ms", words, f"milliseconds per training step, {device}", name, 1e6)


def draw(
    outcomes: Outcomes, *highlight: str, split: str = "validation", axis: Axis = EXECUTED, page: str = ""
) -> Drawing | None:
    """`highlight` are a method's name and those of its controls, in colour on its `page`; `split` the losses' text."""
    corpus, dense = outcomes.comparison.corpus, []
    for setting in outcomes.of("dense"):
        if place := _place(outcomes, setting, axis):
            dense.append((setting.title.removeprefix("dense, "), place))
    name = "-".join(filter(None, ["compare", corpus, axis.name, page]))
    caption = (
        f"{outcomes.comparison.title}: {split} loss over {axis.words}. A coloured line is one trained "
        "model at several budgets or thresholds, a lone mark a model of its own, a hollow one made to match the "
        "parameters; the grey line skips nothing; bars are standard deviations over the seeds. "
        "Above the frame stand losses too high for it; of a line, where it comes nearest."
    )
    shown, drawn = tuple(NAMES[method] for method in highlight), series(outcomes, axis)
    if not highlight:
        left_out = {NAMES[method] for method in SPAN_MARKERS if method not in BEST_SPANS}
        if any(one.label in left_out and one.points for one in drawn):
            caption += " Of the deciders of a span only the two best are drawn."
        drawn = [one for one in drawn if one.label not in left_out]
    return tradeoff(name, caption, dense, drawn, shown, split, axis.label)


def series(outcomes: Outcomes, axis: Axis = EXECUTED) -> list[Points]:
    found = [_trained_alike(outcomes, axis)]
    curves: dict[str, list[str]] = {}
    for setting in outcomes.comparison.settings:
        if setting.method not in NAMES or setting.method == "two_passes":
            continue
        label, (colour, marker) = NAMES[setting.method], _look(setting.method)
        if axis is not EXECUTED or (setting.budget is None and not setting.chosen_by_work):
            place = _place(outcomes, setting, axis)
            found.append(Points(label, [place] if place else [], colour, marker, "none", filled=not setting.matched))
        elif setting.cell not in (drawn := curves.setdefault(setting.method, [])):
            line = LINES[len(drawn)]
            drawn.append(setting.cell)
            label = setting.title.removesuffix(", half") if setting.skips or line != "solid" else label
            found.append(Points(label, outcomes.curve(setting), colour, marker, line))
    return found


def _look(kind: str) -> tuple[str, str]:
    """Colour and marker; deciders of a span have one colour."""
    if kind in SPAN_MARKERS:
        return look("span").colour, SPAN_MARKERS[kind]
    return (look("dense").colour, "s") if kind == "thin" else (look(kind).colour, look(kind).marker)


def _trained_alike(outcomes: Outcomes, axis: Axis) -> Points:
    """What skips nothing and was trained as budget routing is: a second line of dense models."""
    places = [place for setting in outcomes.of("two_passes") if (place := _place(outcomes, setting, axis))]
    return Points(NAMES["two_passes"], sorted(places), look("dense").colour, "d", "dashed")


def _place(outcomes: Outcomes, setting: Setting, axis: Axis) -> Place | None:
    cost, loss = (outcomes.stat(setting, name) for name in (axis.cost, "loss"))
    if cost is None or loss is None or math.isnan(cost.mean):
        return None
    return (axis.scale * cost.mean, *_spread(loss))


def _spread(stat: Stat) -> tuple[float, float]:
    return stat.mean, stat.std or 0.0
