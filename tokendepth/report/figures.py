"""Figures that compare runs: loss over steps, loss over TLOps, active fraction per layer; each as SVG and PNG."""

import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tokendepth.report.palette import INK, PAPER, RowLook, row_looks
from tokendepth.report.summary import Row

STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so figures look the same on every machine
    "font.size": 9,
    "legend.fontsize": 8,
    "text.parse_math": False,  # so that a dollar sign in a passage or name is literal
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "svg.fonttype": "path",  # legible without the font
    "svg.hashsalt": "tokendepth",  # the same runs give the same bytes
}
MODES = {
    "soft": {"marker": "o", "fillstyle": "none", "markersize": 5, "linestyle": (0, (2, 1.5)), "linewidth": 1.1},
    "hard": {"marker": "s", "fillstyle": "full", "markersize": 4.5, "linestyle": "solid", "linewidth": 1.1},
}
SCALES = ((1e12, "10¹², "), (1e9, "10⁹, "), (1e6, "10⁶, "), (1, ""))
WIDTH = 5.2
PNG_DPI = 200


@dataclass(frozen=True)
class Drawing:
    name: str
    """File name without suffix."""
    caption: str
    svg: bytes
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """Our style on top of matplotlib's defaults, independent of a user's matplotlibrc."""
    with matplotlib.style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box, which is clear enough
        yield


def render(figure: Figure, name: str, caption: str) -> Drawing:
    """SVG and PNG without date and version, so that the bytes of an unchanged figure do not change."""
    svg, png = io.BytesIO(), io.BytesIO()
    unsigned = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(svg, format="svg", metadata=unsigned)
    figure.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return Drawing(name, caption, svg.getvalue(), png.getvalue())


def wrapped(label: str, longest: int) -> str:
    """Break a long name into lines, without truncating it."""
    return "\n".join(textwrap.wrap(label, longest)) or label


def looks(table: list[Row]) -> list[RowLook]:
    return row_looks([row.kind for row in table])


def comparison(table: list[Row]) -> list[Drawing]:
    """All figures for which these runs have numbers."""
    with style():
        drawn = (loss_over_steps(table), loss_over_tlops(table), active_fraction(table))
    return [drawing for drawing in drawn if drawing]


def loss_over_steps(table: list[Row]) -> Drawing | None:
    caption = (
        "Validation loss over training steps; the thin pale lines are the training loss. Validation runs the model as "
        "in training, so soft gates skip nothing. The first fifth of a run may be above the panel."
    )
    return _loss_curves(table, "step", 1, "optimiser step", "loss_steps", caption)


def loss_over_tlops(table: list[Row]) -> Drawing | None:
    caption = (
        "Validation loss over cumulative token-layer operations (TLOps) in training. Soft TLOps weight each layer by "
        "its gate, but training computes every layer, so this axis is neither FLOPs nor time."
    )
    largest = max((x for row in table for r in row.records for x, _ in r.curve("tlops", "val_loss")), default=0)
    unit, scale = next((unit, scale) for unit, scale in SCALES if largest >= unit or unit == 1)
    return _loss_curves(table, "tlops", unit, f"cumulative TLOps ({scale}soft weighting)", "loss_tlops", caption)


def _loss_curves(table: list[Row], x: str, unit: float, label: str, name: str, caption: str) -> Drawing | None:
    """One panel per corpus, since losses on different texts cannot be compared."""
    curves = {record.path: record.curve(x, "val_loss") for row in table for record in row.records}
    drawn = [
        (look, row) for look, row in zip(looks(table), table, strict=True) if any(curves[r.path] for r in row.records)
    ]
    corpora = list(dict.fromkeys(row.corpus for _, row in drawn))
    if not corpora:
        return None
    legend = legend_height(row.title for _, row in drawn)
    figure = Figure(figsize=(WIDTH, 2.6 * len(corpora) + 0.35 + legend), layout="constrained")
    panels = figure.subplots(len(corpora), squeeze=False)[:, 0]
    handles = {}
    for axes, corpus in zip(panels, corpora, strict=True):
        members = [(a, row, r) for a, row in drawn if row.corpus == corpus for r in row.records if curves[r.path]]
        for a, row, record in members:
            if x == "step" and (trained := record.curve("step", "task_loss") or record.curve("step", "loss")):
                axes.plot(*zip(*trained, strict=True), color=a.colour, linewidth=0.7, alpha=0.3, zorder=1)
            xs, ys = zip(*curves[record.path], strict=True)
            look = {"color": a.colour, "linestyle": a.dash, "linewidth": 1.5 if len(row.records) == 1 else 1.0}
            if len(xs) <= 12:  # show each validation; a single one would draw no line
                look |= {"marker": "o", "markersize": 3}
            (handles[row.title],) = axes.plot([value / unit for value in xs], ys, zorder=2, **look)
        axes.set_ylim(*_window([[y for _, y in curves[record.path]] for _, _, record in members]))
        axes.set_ylabel("validation loss\n(nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if x == "step":
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if len(corpora) > 1:
            axes.set_title(wrapped(corpus, 60))
    panels[-1].set_xlabel(label)
    legend_below(figure, handles)
    return render(figure, name, caption)


def _window(losses: list[list[float]]) -> tuple[float, float]:
    """Limits that make the final losses distinguishable: at most the worst fifth of each run is above them."""
    low, high = min(map(min, losses)), max(sorted(run)[math.ceil(0.8 * (len(run) - 1))] for run in losses)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def legend_below(figure: Figure, handles: dict) -> None:
    """A legend below the panels, where it hides nothing."""
    labels, across = _legend(handles)
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=across, handlelength=2.4)


def legend_height(labels: Iterable[str]) -> float:
    """Height in inches of `legend_below` with these labels."""
    lines, across = _legend(labels)
    return 0.17 * -(-sum(line.count("\n") + 1 for line in lines) // across)


def _legend(labels: Iterable[str]) -> tuple[list[str], int]:
    """The labels, broken into lines, and the number of columns."""
    lines = [wrapped(label, 64) for label in dict.fromkeys(labels)]
    for across in range(min(len(lines), 3), 1, -1):
        columns = np.array_split(lines, across)  # as matplotlib fills them
        if sum(max(map(_width, column)) for column in columns) <= 72 * WIDTH:
            return lines, across
    return lines, 1


def _width(label: str) -> float:
    """Width of a legend entry with its handle and gaps, in points."""
    size = STYLE["legend.fontsize"]
    return max(TextPath((0, 0), line, size=size).get_extents().width for line in label.split("\n")) + 5.2 * size


def active_fraction(table: list[Row]) -> Drawing | None:
    """Small multiples, one per routed row, so that soft and hard can be compared and runs do not overlap."""
    routed = [(a, row) for a, row in zip(looks(table), table, strict=True) if any(_per_layer(row, m) for m in MODES)]
    if not routed:
        return None
    across = min(len(routed), 3)
    down = -(-len(routed) // across)
    figure = Figure(figsize=(WIDTH if across < 3 else 1.25 * WIDTH, 2.0 * down + 0.75), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, (a, row) in zip(grid.flat, routed, strict=False):
        for mode, look in MODES.items():
            if layers := _per_layer(row, mode):
                means = [statistics.fmean(layer) for layer in layers]
                # Rounding can put the mean of equal values outside of them; an error bar must not be negative.
                below = [max(0, mean - min(layer)) for mean, layer in zip(means, layers, strict=True)]
                above = [max(0, max(layer) - mean) for mean, layer in zip(means, layers, strict=True)]
                axes.errorbar(range(len(layers)), means, [below, above], color=a.colour, **look)
        axes.set_ylim(-0.04, 1.06)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_title(wrapped(row.title, 24 if across == 3 else 30))
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(routed))
        if place + across >= len(routed):  # the lowest panel of its column
            axes.set_xlabel("block (0 is the stem)")
    for axes in grid[:, 0]:
        axes.set_ylabel("active fraction")
    keys = [Line2D([], [], color=INK, **look) for look in MODES.values()]
    labels = ["soft: mean gate weight", "hard: share of active tokens"]
    figure.legend(keys, labels, loc="outside lower center", ncols=2, handlelength=2.6)
    caption = "Active fraction per layer, with bars for the range over seeds. A layer without a router is at 1."
    return render(figure, "active_fraction", caption)


def _per_layer(row: Row, mode: str) -> list[tuple[float, ...]]:
    """For each layer, one value per seed; none for a model without routers."""
    seeds = [record.numbers(mode, "active_fraction_per_site") for record in row.records if record.routed]
    return list(zip(*filter(None, seeds), strict=False))
