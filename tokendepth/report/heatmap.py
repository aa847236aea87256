"""The token map of the TSA paper: a passage above one row per router, teal for active tokens, grey for skipped ones."""

import itertools

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from tokendepth.report.figures import Drawing, render, style
from tokendepth.report.palette import ACTIVE, SKIPPED
from tokendepth.report.records import MARKS, Passage, visible

COLUMNS = 43
"""Characters per line."""
LINES = 6
"""Maximum number of lines on a page; the HTML shows the whole passage."""
CELL = 0.104
"""Inches: width of one character and height of one router's row."""
SPACES = tuple(MARKS.values())
"""White space as written by `visible`."""
LEFT, HEAD, GAP = 0.75, 0.34, 0.9
"""Inches for router names and for panel headings; rows of space between two lines of text."""

TITLES = {
    "soft": "soft: gate weights, everything is computed",
    "hard": "hard: the decisions that sparse executes",
}
SHADES = LinearSegmentedColormap.from_list("depth", [SKIPPED, ACTIVE])


def token_map(passage: Passage, name: str, title: str) -> Drawing:
    """One panel per mode, never mixed; each token is as wide as its text."""
    lines = _wrap([visible(piece) for piece in passage.pieces])
    drawn = lines[:LINES]
    rows = len(drawn) * (len(passage.sites) + 1) + (len(drawn) - 1) * GAP
    modes = passage.modes
    width, panel = LEFT + (COLUMNS + 1) * CELL, rows * CELL + HEAD
    height = panel * len(modes) + 0.1 * (len(modes) - 1) + 0.08
    with style():
        figure = Figure(figsize=(width, height))
        for i, (mode, grid) in enumerate(modes.items()):
            bottom = height - (i + 1) * panel - i * 0.1
            box = (LEFT / width, bottom / height, COLUMNS * CELL / width, rows * CELL / height)
            axes = figure.add_axes(box, xlim=(0, COLUMNS), ylim=(rows, 0))
            axes.axis("off")
            axes.set_title(TITLES[mode], pad=9)
            if i == 0:
                _key(axes)
            _panel(axes, drawn, passage.sites, grid)
        shown = sum(map(len, drawn))
        part = "" if len(lines) == len(drawn) else f" First {shown} of {len(passage.pieces)} tokens."
        panels = " The upper panel shows gate weights, the lower one decisions." if len(modes) > 1 else ""
        caption = (
            f"{title}: each token, above one row per router, which is labelled with its block. Teal: active; grey: "
            f"skipped.{panels}{part}"
        )
        return render(figure, name, caption)


def _wrap(texts: list[str]) -> list[list[str]]:
    """Lines of at most COLUMNS characters, broken between words if possible; tokens longer than a line are cut."""
    lines: list[list[str]] = [[]]
    for text in texts:
        text, line = text[:COLUMNS], lines[-1]
        if sum(map(len, line)) + len(text) > COLUMNS:
            joints = enumerate(itertools.pairwise([*line, text]), 1)
            between = [n for n, (a, b) in joints if a.endswith(SPACES) or b.startswith(SPACES)]
            cut = between[-1] if between else len(line)
            lines[-1:] = [line[:cut], line[cut:]]
        lines[-1].append(text)
    return lines


def _panel(axes: Axes, lines: list[list[str]], sites: list[str], grid: list[list[float]]) -> None:
    first, top = 0, 0.0
    for line in lines:
        ends = list(itertools.accumulate(map(len, line)))
        for text, end in zip(line, ends, strict=True):
            centre = end - len(text) / 2
            axes.text(centre, top + 0.45, text, family="DejaVu Sans Mono", size=7, ha="center", va="center")
        for row, (site, shares) in enumerate(zip(sites, grid, strict=True), 1):
            # One image per router, lower than its row, so that gaps separate routers on any background.
            cells = [share for text, share in zip(line, shares[first:], strict=False) for _ in text]
            extent = (0, len(cells), top + row + 0.95, top + row + 0.05)
            axes.imshow([cells], SHADES, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="none")
            axes.text(-0.6, top + row + 0.5, site[:14], size=6.2, ha="right", va="center")
        first += len(line)
        top += len(sites) + 1 + GAP


def _key(axes: Axes) -> None:
    """The legend for the shades, next to the first panel's heading."""
    top = -1.9
    left, right = COLUMNS - 10, COLUMNS - 4.5
    axes.imshow([[i / 63 for i in range(64)]], SHADES, extent=(left, right, top + 1, top), aspect="auto", clip_on=False)
    for x, text, side in ((left - 0.4, "skipped 0", "right"), (right + 0.4, "1 active", "left")):
        axes.text(x, top + 0.5, text, size=7, ha=side, va="center")
