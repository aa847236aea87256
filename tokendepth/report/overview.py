"""The first figure: loss, FLOPs and speed of every model with real skipping."""

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokendepth.report.figures import Drawing, render, style, wrapped
from tokendepth.report.headline import reference
from tokendepth.report.palette import INK, look
from tokendepth.report.summary import Column, Row, by_key

WIDTH = 3.75
"""Inches, so that a phone shows it at its original size."""
NAME = 16
"""Characters per line of a row's name."""
PANELS = (
    ("loss_hard", "validation loss (lower is better)", ".4f", 1.0),
    ("flops_per_token", "million FLOPs per token (lower is better)", ".3g", 1e-6),
    ("speedup", "speed, dense = 1 (higher is better)", ".2f", 1.0),
)


def overview(name: str, members: Sequence[Row]) -> Drawing | None:
    """For the rows of one corpus; None if nothing was evaluated."""
    members = [row for row in members if row.stat(by_key("loss_hard"))]
    panels = [panel for panel in PANELS if any(row.stat(by_key(panel[0])) for row in members)]
    if not members:
        return None
    names = [wrapped(row.title, NAME) for row in members]
    lines = [name.count("\n") + 1.2 for name in names]
    centres = [end - own / 2 for end, own in zip(itertools.accumulate(lines), lines, strict=True)]
    with style():
        figure = Figure(figsize=(WIDTH, len(panels) * (0.32 + 0.18 * sum(lines))), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, (key, title, form, unit) in zip(grid, panels, strict=True):
            _bars(axes, dict(zip(centres, members, strict=True)), by_key(key), form, unit)
            axes.set_title(title, fontsize=8.5)
            axes.set_ylim(sum(lines), 0)
            axes.set_yticks(centres, names, fontsize=8)
        caption = (
            "Quality and cost of each model with real skipping. Speed: a forward pass, timed in turns with that of the "
            "dense model of the same shape."
        )
        return render(figure, name, caption)


def _bars(axes: Axes, members: dict[float, Row], column: Column, form: str, unit: float) -> None:
    """`members`: rows by the vertical position of their bars."""
    values = {place: stat.mean * unit for place, row in members.items() if (stat := row.stat(column))}
    speed = column.key == "speedup"
    unclear = {place for place, row in members.items() if speed and row.times_overlap}
    values = {place: value for place, value in values.items() if place not in unclear}
    if speed:  # the dense model's
        timed = [row for place, row in members.items() if place in values or place in unclear]
        against = [reference(row, list(members.values())) for row in timed]
        values |= {place: 1.0 for place, row in members.items() if row in against}
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    right = max(values.values(), default=1.0)
    for place, row in members.items():
        value = values.get(place, 0.0)
        axes.barh(place, value, 0.75, color=look(row.kind).colour)
        missing = "times overlap" if place in unclear else "not measured"
        words = f"{value:{form}}" + ("x" if speed else "") if place in values else missing
        end = max(value, 1.0) if speed else value  # the line at 1 stays free of words
        axes.text(end + 0.02 * right, place, words, va="center", fontsize=8)
    axes.set_xlim(0, 1.2 * max(right, speed))
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
