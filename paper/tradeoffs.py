"""From the outcomes of a comparison to its picture; on a method's page, with that method alone in colour."""

import math
from dataclasses import dataclass

from paper.outcomes import Cost, Outcomes
from paper.settings import Setting
from tokendepth.report.figures import Drawing
from tokendepth.report.palette import INK
from tokendepth.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, VERMILLION, Points
from tokendepth.report.summary import Stat
from tokendepth.report.tradeoff import Place, tradeoff

BROWN, PURPLE = "#7a4a21", "#4b2e83"  # dark, so that they stay apart from the others by lightness
# Markers differ too: six colours are as many as stay apart to every eye.
LOOKS = {
    "random": ("random routing", INK, "x"),
    "thin": ("dense, thin and deep", GREY, "s"),
    "two_passes": ("two passes, nothing skipped", GREY, "d"),
    "tsa": ("TSA", VERMILLION, "s"),
    "budget": ("budget", BLUE, "o"),
    "early_exit": ("early exit", GREEN, "^"),
    "mod": ("MoD", PINK, "D"),
    "mor": ("MoR", ORANGE, "P"),
    "act": ("ACT", SKY, "X"),
    "itt": ("ITT", BROWN, "v"),
    "switch": ("Switch", PURPLE, "*"),
    "span_rule": ("span by a rule", BLUE, "D"),
    "span_boundary": ("span by learned boundaries", GREEN, "D"),
    "span_gain": ("span by what skipping costs", VERMILLION, "D"),
    "span_dice": ("span by dice", INK, "+"),
    "span_score": ("span by a learned score", ORANGE, "D"),
}

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
TIMED = Axis("step_ms", "the time of a training step", "milliseconds per training step", "time", 1e6)


def draw(outcomes: Outcomes, *highlight: str, split: str = "validation", axis: Axis = EXECUTED) -> Drawing | None:
    """`highlight` is a method's name, and those of its controls; `split` is where the losses are from."""
    corpus, dense = outcomes.comparison.corpus, []
    for setting in outcomes.of("dense"):
        if place := _place(outcomes, setting, axis):
            dense.append((setting.title.removeprefix("dense, "), place))
    name = "-".join(filter(None, ["compare", corpus, axis.name, *highlight[:1]]))
    caption = (
        f"{outcomes.comparison.title}: {split} loss over {axis.words}. A coloured line is one trained "
        "model at several budgets or thresholds, a lone mark a model of its own, a hollow one made to match the "
        "parameters; grey lines skip nothing and have fewer layers; bars are standard deviations over the seeds. "
        "Above the frame stand losses too high for it; of a line, where it comes nearest."
    )
    shown = tuple(LOOKS[method][0] for method in highlight)
    return tradeoff(name, caption, dense, series(outcomes, axis), shown, split, axis.label)


def series(outcomes: Outcomes, axis: Axis = EXECUTED) -> list[Points]:
    found = [_trained_alike(outcomes, axis)]
    curves: dict[str, list[str]] = {}
    for setting in outcomes.comparison.settings:
        if setting.method not in LOOKS or setting.method == "two_passes":
            continue
        label, colour, marker = LOOKS[setting.method]
        if axis is not EXECUTED or (setting.budget is None and not setting.chosen_by_work):
            place = _place(outcomes, setting, axis)
            found.append(Points(label, [place] if place else [], colour, marker, "none", filled=not setting.matched))
        elif setting.cell not in (drawn := curves.setdefault(setting.method, [])):
            line = LINES[len(drawn)]
            drawn.append(setting.cell)
            label = setting.title.removesuffix(", half") if setting.skips or line != "solid" else label
            found.append(Points(label, outcomes.curve(setting), colour, marker, line))
    return found


def _trained_alike(outcomes: Outcomes, axis: Axis) -> Points:
    """What skips nothing and was trained as budget routing is: a second grey line."""
    label, colour, marker = LOOKS["two_passes"]
    places = [place for setting in outcomes.of("two_passes") if (place := _place(outcomes, setting, axis))]
    return Points(label, sorted(places), colour, marker, "dashed")


def _place(outcomes: Outcomes, setting: Setting, axis: Axis) -> Place | None:
    cost, loss = (outcomes.stat(setting, name) for name in (axis.cost, "loss"))
    if cost is None or loss is None or math.isnan(cost.mean):
        return None
    return (axis.scale * cost.mean, *_spread(loss))


def _spread(stat: Stat) -> tuple[float, float]:
    return stat.mean, stat.std or 0.0
