"""The figure of gaps: the loss of every method relative to dense models with the same FLOPs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from paper import spans
from paper.comparison import judge
from paper.depth import outcomes
from paper.outcomes import Outcomes
from paper.scales import against_six_layers, at_equal_flops, outcomes_at_scales
from paper.tradeoffs import NAMES
from tokendepth.report.figures import WIDTH, Drawing, render, style
from tokendepth.report.palette import ACTIVE, ALARM, INK, look
from tokendepth.report.plots import GUIDE
from tokendepth.report.summary import Stat

WORST = 0.03
"""Larger gaps are drawn at the edge, with their number."""


@dataclass(frozen=True)
class Gap:
    label: str
    difference: Stat
    """Of the loss, relative to dense models, seed by seed."""


def of_study(results: Path, *, quick: bool = False) -> Drawing | None:
    """All methods at the first scale, then span at word ends at others."""
    scales, name = outcomes_at_scales(results, quick=quick), NAMES[spans.RULE]
    beside = {title: gap for title, gap in at_equal_flops(scales).items() if title != spans.BASE.title}
    groups = {
        "All methods, same tuning": gaps(outcomes(results, quick=quick)[0]),
        f"{name}, at other scales": [Gap(*one) for one in beside.items()],
        f"{name}, relative to six dense layers": [Gap(*one) for one in against_six_layers(scales).items()],
    }
    about = "In the last group relative to six dense layers alone, whose FLOPs are slightly higher."
    return draw(groups, "gaps-enwik8", "enwik8, bytes, width 256 unless a row says otherwise", about)


def gaps(found: Outcomes) -> list[Gap]:
    """One for every method, relative to dense models with the same FLOPs; the best first."""
    made = []
    for setting in found.comparison.settings:
        if setting.method in NAMES:
            against = found.beside(setting)
            if isinstance(against, tuple):
                made.append(Gap(NAMES[setting.method], against[1]))
    return sorted(made, key=lambda gap: gap.difference.mean)


def draw(groups: Mapping[str, Sequence[Gap]], name: str, title: str, about: str = "") -> Drawing | None:
    """Groups of rows below each other, with their headings; `about` is added to the caption."""
    groups = {words: rows for words, rows in groups.items() if rows}
    if not groups:
        return None
    heights = [len(rows) for rows in groups.values()]
    with style():
        size = (WIDTH, 0.6 + 0.36 * len(groups) + 0.22 * sum(heights))
        figure = Figure(figsize=size, layout="constrained")
        column = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (words, rows) in zip(column, groups.items(), strict=True):
            _rows(axes, rows)
            place, at = ("figure fraction", "axes fraction"), (0.01, 1.01)
            axes.annotate(words, at, xycoords=place, fontweight="bold", va="bottom", annotation_clip=False)
        first, last = column[0], column[-1]
        last.set_xlim(-WORST, WORST)
        last.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        last.set_xlabel("loss relative to dense models")
        first.annotate("better", (0.01, 1.01), xycoords="axes fraction", color=ACTIVE, va="bottom")
        first.annotate("dense", (0.5, 1.01), xycoords="axes fraction", color=INK, va="bottom", ha="center")
        first.annotate("worse", (0.99, 1.01), xycoords="axes fraction", color=ALARM, va="bottom", ha="right")
        caption = (
            f"{title}: test loss with tokens really skipped, relative to dense models with the same executed FLOPs. "
            f"{about} Bars: standard deviation over seeds. Hollow: one seed. Grey: no clear difference."
        )
        return render(figure, name, caption)


def _rows(axes: Axes, rows: Sequence[Gap]) -> None:
    axes.axvline(0, color=look("dense").colour, linewidth=1.6)
    for height, gap in enumerate(rows):
        mean, spread = gap.difference.mean, gap.difference.std
        colour = {"better": ACTIVE, "worse": ALARM}.get(judge(gap.difference), GUIDE)
        style_of = {"color": colour, "marker": "o", "markersize": 5, "capsize": 2.5, "clip_on": False}
        filled = "full" if spread is not None else "none"
        at = min(mean, WORST)
        bar = None if spread is None or mean > WORST else [[spread], [min(spread, WORST - mean)]]  # not into words
        axes.errorbar([at], [height], xerr=bar, fillstyle=filled, **style_of)
        words = f"{mean:+.1%}" + (" \u2192" if mean > WORST else "")
        axes.annotate(words, (1.04, height), xycoords=("axes fraction", "data"), va="center", color=colour)
    axes.set_yticks(range(len(rows)), [gap.label for gap in rows])
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.grid(axis="y", visible=False)
