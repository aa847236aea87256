"""Labels for points of a figure, placed so that they cover no other label and as little else as possible.

Call these functions last, when everything else is drawn and the limits of the axes are set.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from tokendepth.report.palette import PAPER

PLACES = [
    (x, y, ("left", "center", "right")[1 - x], ("bottom", "center", "top")[1 - y])
    for x, y in ((-1, -1), (1, -1), (-1, 1), (1, 1), (0, -1), (0, 1), (1, 0), (-1, 0))
]
"""Places around a point, as direction and alignment, in order of preference."""
DISTANCES = (4, 9, 14)
MARK = 10
"""Cost of covering a marker, in pixels of covered line."""
FOREIGN = 40
"""Cost of being near the point of another label, to which the words would seem to belong."""
HALO = withStroke(linewidth=2, foreground=PAPER)
"""Keeps words legible that have to be on a line."""
LINE = 9
"""Line height above the frame, in points."""


def beside(axes: Axes, words: Iterable[tuple[str, float, float, str]], **look: object) -> None:
    """Write texts (text, x, y, colour), each next to its point."""
    _lay_out(axes)
    lines, marks = (np.concatenate(found) for found in zip(*_drawn(axes), strict=True))
    frame, taken, words = axes.get_window_extent(), _boxes(axes), list(words)
    for text, x, y, colour in words:
        tried, others = [], np.array([(a, b) for _, a, b, _ in words if (a, b) != (x, y)]).reshape(-1, 2)
        others = axes.transData.transform(others)
        for distance in DISTANCES:
            for right, up, ha, va in PLACES:
                offset = (distance * right, distance * up)
                label = _write(axes, text, (x, y), offset, ha=ha, va=va, **look)
                box = label.get_window_extent()
                label.remove()
                outside = box.width * box.height - _overlap(box, frame)
                covered = sum(_overlap(box, other) for other in taken) + outside
                hidden = box.padded(2).count_contains(lines) + MARK * box.padded(4).count_contains(marks)
                hidden += FOREIGN * box.padded(12).count_contains(others)
                tried.append(((covered, hidden + 2 * distance), offset, ha, va, box))
        _, offset, ha, va, box = min(tried, key=lambda one: one[0])
        _write(axes, text, (x, y), offset, ha=ha, va=va, color=colour, path_effects=[HALO], **look)
        taken.append(box)


def above(axes: Axes, words: Iterable[tuple[float, str, str]], top: float, **look: object) -> float:
    """Write texts (x, text, colour) above the frame, whose edge is at `top`, inside the figure and without overlap.

    Returns their total height in inches.
    """
    _lay_out(axes)
    taken: list[Bbox] = []
    lines = 0
    for x, text, colour in sorted(words):
        shift = _shift(axes, text, (x, top), **look)
        line = 0
        while True:
            offset = (shift, 5 + LINE * line)
            label = _write(axes, text, (x, top), offset, ha="center", color=colour, **look)
            box = label.get_window_extent()
            if not any(_overlap(box.padded(1), other) for other in taken):
                break
            label.remove()
            line += 1
        taken.append(box)
        lines = max(lines, line + 1)
    return lines * LINE / 72


def _lay_out(axes: Axes) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()


def _write(axes: Axes, text: str, point: tuple[float, float], offset: tuple[float, float], **look) -> Annotation:
    return axes.annotate(text, point, textcoords="offset points", xytext=offset, **look)


def _shift(axes: Axes, text: str, point: tuple[float, float], **look: object) -> float:
    """How far to move a centred text, in points, to keep it inside the figure."""
    label = _write(axes, text, point, (0, 0), ha="center", **look)
    box, figure = label.get_window_extent(), axes.figure.bbox
    label.remove()
    margin = 2
    pixels = max(0, figure.x0 + margin - box.x0) - max(0, box.x1 - figure.x1 + margin)
    return pixels * 72 / axes.figure.dpi


def _overlap(a: Bbox, b: Bbox) -> float:
    """Overlapping area in square pixels."""
    both = Bbox.intersection(a, b)
    return both.width * both.height if both else 0.0


def _boxes(axes: Axes) -> list[Bbox]:
    return [text.get_window_extent() for text in axes.texts]


def _drawn(axes: Axes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Dense points along lines and error bars, in pixels, and the positions of their markers."""
    yield np.empty((0, 2)), np.empty((0, 2))
    paths = [line.get_xydata() for line in axes.lines]
    bars = [c for c in axes.collections if isinstance(c, LineCollection)]
    paths += [segment for bar in bars for segment in bar.get_segments()]
    for path in paths:
        corners = axes.transData.transform(np.asarray(path, float))
        dense = [
            start + (end - start) * np.arange(0, 1, 1 / (1 + np.linalg.norm(end - start)))[:, None]
            for start, end in itertools.pairwise(corners)
        ]
        yield np.concatenate([corners, *dense]), corners
