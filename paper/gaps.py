"""Who beats a dense model of the same FLOPs, in one picture: every method's distance from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from paper.comparison import judge
from paper.outcomes import Outcomes
from paper.tradeoffs import NAMES
from tokendepth.report.figures import WIDTH, Drawing, render, style
from tokendepth.report.palette import ACTIVE, ALARM, INK, look
from tokendepth.report.plots import GUIDE
from tokendepth.report.summary import Stat

WORST = 0.03
"""What is further above a dense model stands at the edge, with its number."""
LARGER = "span_rule", "span_taught"
"""Shown at other scales, too."""


@dataclass(frozen=True)
class Gap:
    label: str
    difference: Stat
    """Relative, of the loss to that of dense models of the same executed FLOPs, seed by seed."""


def gaps(found: Outcomes, where: str = "", only: Sequence[str] = ()) -> list[Gap]:
    made = []
    for setting in found.comparison.settings:
        if setting.method in NAMES and (not only or setting.method in only):
            against = found.beside(setting)
            if isinstance(against, tuple):
                made.append(Gap(NAMES[setting.method] + where, against[1]))
    return made


def draw(made: Sequence[Gap], name: str, title: str) -> Drawing | None:
    if not made:
        return None
    made = sorted(made, key=lambda gap: gap.difference.mean, reverse=True)
    with style():
        figure = Figure(figsize=(WIDTH, 0.9 + 0.22 * len(made)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=look("dense").colour, linewidth=1.6)
        for height, gap in enumerate(made):
            mean, spread = gap.difference.mean, gap.difference.std
            colour = {"better": ACTIVE, "worse": ALARM}.get(judge(gap.difference), GUIDE)
            style_of = {"color": colour, "marker": "o", "markersize": 5, "capsize": 2.5, "clip_on": False}
            filled = "full" if spread is not None else "none"
            at = min(mean, WORST)
            bar = None if spread is None or mean > WORST else [[spread], [min(spread, WORST - mean)]]  # not into words
            axes.errorbar([at], [height], xerr=bar, fillstyle=filled, **style_of)
            words = f"{mean:+.1%}" + (" \u2192" if mean > WORST else "")
            axes.annotate(words, (1.02, height), xycoords=("axes fraction", "data"), va="center", color=colour)
        axes.set_yticks(range(len(made)), [gap.label for gap in made])
        axes.set_ylim(-0.7, len(made) - 0.3)
        axes.set_xlim(-WORST, WORST)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("loss beside a dense model\nof the same executed FLOPs")
        axes.annotate("better", (0.01, 1.01), xycoords="axes fraction", color=ACTIVE, va="bottom")
        axes.annotate("dense", (0.5, 1.01), xycoords="axes fraction", color=INK, va="bottom", ha="center")
        axes.annotate("worse", (0.99, 1.01), xycoords="axes fraction", color=ALARM, va="bottom", ha="right")
        caption = (
            f"{title}: the loss of every method, executed, relative to that of dense models of the same executed "
            "FLOPs. Bars are standard deviations over the seeds; hollow marks have one seed; grey ones are not told "
            "apart from a dense model."
        )
        return render(figure, name, caption)
