"""The figure of a comparison: loss over cost. On the page of a method, only that method is in colour."""

import math
import re
from dataclasses import dataclass

from paper.contenders import DECIDERS, SPAN_DICE
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
    "two_passes": "two passes per step, nothing skipped",
    "tsa": "TSA",
    "budget": "budget",
    "early_exit": "early exit",
    "mod": "MoD",
    "mor": "MoR",
    "act": "ACT",
    "itt": "ITT",
    "switch": "Switch",
    **{f"span_{decider}": title for decider, title in DECIDERS.items()},
    "span_dice": SPAN_DICE,
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
"""Shown in the figure of all methods, where seven marks at nearly the same FLOPs would overlap."""
LINES = ("solid", "dashed", "dotted")
"""For the models of one method that have a curve."""


@dataclass(frozen=True)
class Axis:
    """The cost on the x axis."""

    cost: Cost
    words: str
    label: str
    name: str = ""
    """Added to the name of the figure."""
    scale: float = 1.0
    """To the unit of the label, in millionths."""


EXECUTED = Axis(
    "flops_per_token", "executed FLOPs per token", "million executed FLOPs per token (including head and routers)"
)
TRAINED = Axis(
    "training_flops", "training FLOPs per token", "million FLOPs per token, trained (forward and backward)", "training"
)


def timed_on(device: str) -> Axis:
    words = f"time per training step, {device}"
    name = re.sub("[^a-z0-9]+", "-", f"time {device}".lower())
    return Axis("step_ms", words, f"milliseconds per training step, {device}", name, 1e6)


def draw(
    outcomes: Outcomes, *highlight: str, split: str = "validation", axis: Axis = EXECUTED, page: str = ""
) -> Drawing | None:
    """`highlight` names the methods in colour: one and its controls, on its `page`. `split` is that of the losses."""
    corpus, dense = outcomes.comparison.corpus, []
    for setting in outcomes.of("dense"):
        if place := _place(outcomes, setting, axis):
            dense.append((setting.title.removeprefix("dense, "), place))
    name = "-".join(filter(None, ["compare", corpus, axis.name, page]))
    shown, drawn = tuple(NAMES[method] for method in highlight), series(outcomes, axis)
    caption = [
        f"{outcomes.comparison.title}: {split} loss over {axis.words}.",
        "Marks at the top edge are off the scale.",
    ]
    if not highlight:
        left_out = {NAMES[method] for method in SPAN_MARKERS if method not in BEST_SPANS}
        if any(one.label in left_out and one.points for one in drawn):
            caption.append("Of the span variants only the best two are drawn.")
        drawn = [one for one in drawn if one.label not in left_out]
    caption[1:1] = _marks([one for one in drawn if one.points])
    return tradeoff(name, " ".join(caption), dense, drawn, shown, split, axis.label)


def _marks(drawn: list[Points]) -> list[str]:
    """What the marks of these mean."""
    lines = any(one.line != "none" and one.label != NAMES["two_passes"] for one in drawn)
    single = "Single marks: separate models"
    if any(not one.filled for one in drawn):
        single += " (hollow: with matched parameters)"
    about = ["Coloured lines: one trained model at several budgets or thresholds."] if lines else []
    return [*about, f"{single}.", "Grey line: dense models.", "Bars: standard deviation over seeds."]


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
    """Colour and marker; all deciders of a span have the same colour."""
    if kind in SPAN_MARKERS:
        return look("span").colour, SPAN_MARKERS[kind]
    return (look("dense").colour, "s") if kind == "thin" else (look(kind).colour, look(kind).marker)


def _trained_alike(outcomes: Outcomes, axis: Axis) -> Points:
    """Models that skip nothing and train with two passes per step, as budget routing: a second line of dense models."""
    places = [place for setting in outcomes.of("two_passes") if (place := _place(outcomes, setting, axis))]
    return Points(NAMES["two_passes"], sorted(places), look("dense").colour, "d", "dashed")


def _place(outcomes: Outcomes, setting: Setting, axis: Axis) -> Place | None:
    cost, loss = (outcomes.stat(setting, name) for name in (axis.cost, "loss"))
    if cost is None or loss is None or math.isnan(cost.mean):
        return None
    return (axis.scale * cost.mean, *_spread(loss))


def _spread(stat: Stat) -> tuple[float, float]:
    return stat.mean, stat.std or 0.0
