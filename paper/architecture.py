"""The drawing of the TSA method: how a block uses a token's gate in training, and what it skips at inference."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from tokendepth.report.figures import WIDTH, Drawing, render, style
from tokendepth.report.palette import ACTIVE, INK, look

PLAIN, WORK = "#eef1f4", "#dcefe9"
GATE = look("tsa").colour
ROUTER = GATE + "26"
PASSED = "#6b7783"
"""The path of a skipped token."""


def architecture() -> Drawing:
    with style():
        figure = Figure(figsize=(WIDTH, 4.3))
        soft, sparse = (figure.add_axes((left, 0.02, 0.48, 0.9)) for left in (0.01, 0.51))
        for axes, title in ((soft, "training: soft, all is computed"), (sparse, "inference: sparse, work is skipped")):
            axes.set(xlim=(0, 10), ylim=(0, 16))
            axes.axis("off")
            axes.text(5, 15.4, title, ha="center", va="bottom", size=8.5, weight="bold")
            _box(axes, 5, 1.0, 7.8, 1.2, "embedding, stem $f_0$: every token", PLAIN)
            _box(axes, 5, 4.0, 4.6, 1.3, "router $r_l$: halting $p_l$", ROUTER)
            _arrow(axes, (5, 1.6), (5, 3.35))
            _words(axes, 5.2, 2.45, "$h$", size=8.5, va="center")
        _soft(soft)
        _sparse(sparse)
        caption = (
            "Token-Selective Attention. Left, training: each token's attention and feed-forward updates are scaled by "
            "1 - p, so every layer is computed. Right, inference: a token with p above 0.5 skips the block unchanged; "
            "it still provides its key and value to the others."
        )
        return render(figure, "architecture", caption)


def _soft(axes: Axes) -> None:
    _box(axes, 5, 7.4, 6.4, 1.3, "attention: every token", WORK)
    _box(axes, 5, 10.6, 6.4, 1.3, "feed-forward: every token", WORK)
    _arrow(axes, (5, 4.65), (5, 6.75))
    for low, high in ((8.05, 9.95), (11.25, 13.3)):
        _arrow(axes, (5, low), (5, high))
        _words(axes, 5.25, (low + high) / 2, r"$\times\,(1-p_l)$, added to $h$", size=8, va="center", color=GATE)
    # The same gate scales both updates.
    axes.add_patch(_line((2.7, 4.0), (1.2, 4.0)))
    axes.add_patch(_line((1.2, 4.0), (1.2, 12.3)))
    for height in (9.0, 12.3):
        _arrow(axes, (1.2, height), (4.85, height), GATE)
    _words(axes, 0.95, 8.0, "gate $1-p_l$", size=8, rotation=90, ha="right", va="center", color=GATE)
    _box(axes, 5, 14.0, 6.4, 1.3, "next block, or head", PLAIN)


def _sparse(axes: Axes) -> None:
    _box(axes, 3.6, 6.7, 5.4, 1.4, "keys, values:\nevery token", WORK)
    _box(axes, 3.6, 9.1, 5.4, 1.4, "queries, rows, output:\nactive tokens", ACTIVE + "55")
    _box(axes, 3.6, 11.5, 5.4, 1.4, "feed-forward:\nactive tokens", ACTIVE + "55")
    for low, high in ((4.65, 6.0), (7.4, 8.4), (9.8, 10.8), (12.2, 13.35)):
        _arrow(axes, (3.6, low), (3.6, high))
    _words(axes, 3.4, 7.9, r"$p_l \leq 0.5$: active", size=8, ha="right", va="center")
    axes.add_patch(_line((7.3, 4.0), (8.6, 4.0), PASSED))
    axes.add_patch(_line((8.6, 4.0), (8.6, 12.75), PASSED))
    axes.add_patch(_line((8.6, 12.75), (7.4, 12.75), PASSED))
    _arrow(axes, (7.4, 12.75), (7.4, 13.35), PASSED)
    _words(axes, 8.85, 8.6, "$p_l > 0.5$: unchanged", size=8, rotation=270, ha="left", va="center", color=PASSED)
    _box(axes, 5, 14.0, 6.4, 1.3, "next block, or head", PLAIN)


def _words(axes: Axes, x: float, y: float, words: str, **look: Any) -> None:
    axes.text(x, y, words, parse_math=True, **look)


def _box(axes: Axes, x: float, y: float, width: float, height: float, words: str, fill: str) -> None:
    corner = (x - width / 2, y - height / 2)
    shape = FancyBboxPatch(corner, width, height, "round,pad=0,rounding_size=0.25", fc=fill, ec=INK, lw=0.9)
    axes.add_patch(shape)
    _words(axes, x, y, words, ha="center", va="center", size=8, linespacing=1.15)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, lw=1.1, shrinkA=0, shrinkB=0)
    )


def _line(start: tuple[float, float], end: tuple[float, float], colour: str = GATE) -> FancyArrowPatch:
    return FancyArrowPatch(start, end, arrowstyle="-", color=colour, lw=1.1, shrinkA=0, shrinkB=0)
