"""From the outcomes of a comparison to its picture; on a method's page, with that method alone in colour."""

from paper.outcomes import Outcomes
from paper.settings import Setting
from tokendepth.report.figures import Drawing
from tokendepth.report.palette import look
from tokendepth.report.plots import Points
from tokendepth.report.summary import Stat
from tokendepth.report.tradeoff import Place, tradeoff

NAMES = {
    "random": "random routing",
    "two_passes": "two passes, nothing skipped",
    "tsa": "TSA",
    "budget": "budget",
    "early_exit": "early exit",
    "mod": "MoD",
    "mor": "MoR",
    "act": "ACT",
    "itt": "ITT",
    "switch": "Switch",
}

LINES = ("solid", "dashed", "dotted")
"""Of the models of one method that have a curve."""


def draw(outcomes: Outcomes, *highlight: str) -> Drawing | None:
    """`highlight` is a method's name, and those of its controls."""
    corpus, dense = outcomes.comparison.corpus, []
    for setting in outcomes.of("dense"):
        if place := _place(outcomes, setting):
            dense.append((setting.title.removeprefix("dense, "), place))
    name = "-".join(["compare", corpus, *highlight[:1]])
    caption = (
        f"{outcomes.comparison.title}: validation loss over executed FLOPs per token. A coloured line is one trained "
        "model at several budgets or thresholds, a lone mark a model of its own, a hollow one made to match the "
        "parameters; grey lines skip nothing and have fewer layers; bars are standard deviations over the seeds. "
        "Above the frame stand losses too high for it; of a line, where it comes nearest."
    )
    return tradeoff(name, caption, dense, series(outcomes), tuple(NAMES[method] for method in highlight))


def series(outcomes: Outcomes) -> list[Points]:
    found = [_trained_alike(outcomes)]
    curves: dict[str, list[str]] = {}
    for setting in outcomes.comparison.settings:
        if setting.method not in NAMES or setting.method == "two_passes":
            continue
        label, colour, marker = NAMES[setting.method], look(setting.method).colour, look(setting.method).marker
        if setting.budget is None and setting.skips is None:
            place = _place(outcomes, setting)
            found.append(Points(label, [place] if place else [], colour, marker, "none", filled=not setting.matched))
        elif setting.cell not in (drawn := curves.setdefault(setting.method, [])):
            line = LINES[len(drawn)]
            drawn.append(setting.cell)
            label = setting.title.removesuffix(", half") if setting.skips or line != "solid" else label
            found.append(Points(label, outcomes.curve(setting), colour, marker, line))
    return found


def _trained_alike(outcomes: Outcomes) -> Points:
    """What skips nothing and was trained as budget routing is: a second line of dense models."""
    places = [place for setting in outcomes.of("two_passes") if (place := _place(outcomes, setting))]
    return Points(NAMES["two_passes"], sorted(places), look("dense").colour, "d", "dashed")


def _place(outcomes: Outcomes, setting: Setting) -> Place | None:
    cost, loss = (outcomes.stat(setting, name) for name in ("flops_per_token", "loss"))
    return (cost.mean, *_spread(loss)) if cost and loss else None


def _spread(stat: Stat) -> tuple[float, float]:
    return stat.mean, stat.std or 0.0
