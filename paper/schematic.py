"""Drawings of how each method spends depth: one column per token, one row per layer, in order of execution."""

import re
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from tokendepth.report.figures import WIDTH, Drawing, render, style
from tokendepth.report.palette import ACTIVE, INK, PAPER, SKIPPED

WORKED, KEPT, PASSED, ATTENDED = "#", "k", ".", "a"
FILLS = {
    WORKED: (ACTIVE + "aa", "processed"),
    KEPT: (SKIPPED, "skipped, keeps key and value"),
    PASSED: (PAPER, "skipped, no key or value"),
    ATTENDED: ("#cfe6e3", "attention only"),
}
EXPERTS = "1234"


@dataclass(frozen=True)
class Schematic:
    caption: str
    layers: tuple[tuple[str, str], ...]
    """Label and one letter per token, the first layer first. A digit is the expert that processed the token."""
    shared: tuple[tuple[int, int], ...] = ()
    """First and last of the layers that share weights."""
    text: str = ""
    """One character per token, if it matters which."""
    carried: int | None = None
    """The layer whose updates are carried over to the tokens that skipped it."""


_ALL = "#" * 10


def _blocks(*rows: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"block {n}", row) for n, row in enumerate(rows))


SCHEMATICS = {
    "dense": Schematic("Every token goes through every block.", _blocks(*[_ALL] * 6)),
    "tsa": Schematic(
        "At the threshold, each router decides for its own block. How many tokens it keeps is learned. A skipped token "
        "still provides its key and value.",
        _blocks(_ALL, "#k##kk#k##", "######k###", "##k#######", "###k##k###", "#####k####"),
    ),
    "budget": Schematic(
        "At budget 0.4 each routed block processes 4 of 10 tokens; which ones is learned. The others still provide key "
        "and value.",
        _blocks(_ALL, "#k#kkk##kk", "k##kk#kk#k", "#kk#k##kkk", "kk##kk#kk#", "#k#kk##kkk"),
    ),
    "early_exit": Schematic(
        "A token leaves for good. Later blocks project its key and value from the state that it left with.",
        _blocks(_ALL, "#k####k###", "#k#k##k#k#", "kk#k##k#k#", "kk#k#kk#kk", "kk#kkkk#kk"),
    ),
    "mod": Schematic(
        "Every other block takes an eighth of the tokens (here one of ten). The others have no key or value there.",
        _blocks(_ALL, "..#.......", _ALL, "......#...", _ALL, "#........."),
    ),
    "mor": Schematic(
        "Between a first and a last layer, a shared pair is applied again to the remaining tokens. With recursion-wise "
        "keys and values, only these attend to each other there.",
        (
            ("first", _ALL), ("shared a", _ALL), ("shared b", _ALL), ("shared a again", "#..##.#.#."),
            ("shared b again", "#..##.#.#."), ("last", _ALL),
        ),
        shared=((1, 3), (2, 4)),
    ),
    "act": Schematic(
        "One block, step after step. A halted token is frozen; its state still provides key and value.",
        tuple(
            (f"step {n}", row)
            for n, row in enumerate((_ALL, "###k######", "#k#k##k###", "kk#k##k#k#", "kk#kkkk#kk", "kk#kkkkkkk"), 1)
        ),
        shared=((0, 5),),
    ),
    "itt": Schematic(
        "Every other layer is applied again, up to four times in all, to the tokens that need it. Here: the first two "
        "layers.",
        (
            ("layer 0", _ALL), ("layer 1", _ALL), ("layer 1, thinking", "###.##.##."),
            ("layer 1, thinking", "#.###.##.#"), ("layer 1, thinking", ".###.##.##"),
        ),
        shared=((1, 4),),
    ),
    "span": Schematic(
        "One decision covers blocks 3 to 6; here tokens at word ends take them. They go through all four as a shorter "
        "sequence. The others have no keys and values there and receive the update of the last token that took the "
        "span (arrows).",
        _blocks(*[_ALL] * 3, *["#..#...#.."] * 4, *[_ALL] * 2),
        text="the cat on",
        carried=6,
    ),
    "switch": Schematic(
        "In every other block each token takes one of four feed-forward networks (the numbers). All cost the same. A "
        "token whose expert is full gets attention only.",
        _blocks(_ALL, "1324113a24", _ALL, "42131a2431", _ALL, "2314421a13"),
    ),
}  # fmt: skip


def schematic(method: str) -> Drawing:
    drawn = SCHEMATICS[method]
    with style():
        figure = Figure(figsize=(WIDTH, 0.9 + 0.27 * len(drawn.layers)), layout="constrained")
        axes = figure.subplots()
        for depth, (label, row) in enumerate(drawn.layers):
            axes.text(-0.3, depth + 0.5, label, ha="right", va="center", size=8)
            for token, letter in enumerate(row):
                _cell(axes, token, depth, letter)
        for number, span in enumerate(drawn.shared):
            _bracket(axes, len(_ALL) + 0.3 + 0.45 * number, *span)
        if drawn.shared:
            x, middle = len(_ALL) + 0.5 + 0.45 * len(drawn.shared), sum(drawn.shared[0]) / 2 + 0.5
            axes.text(x, middle, "same\nweights", va="center", size=7.5)
        if drawn.carried is not None:
            _carry(axes, drawn.carried, drawn.layers[drawn.carried][1])
        for token, letter in enumerate(drawn.text):
            axes.text(token + 0.5, 0, letter.replace(" ", "␣"), ha="center", va="top", size=8)
        below = -0.7 if drawn.text else -0.15
        axes.set(xlim=(-3.6, len(_ALL) + 3.0), ylim=(below - 0.55, len(drawn.layers) + 0.1))
        axes.text(len(_ALL) / 2, below, "tokens of a text, from left to right", ha="center", va="top", size=8)
        axes.axis("off")
        used = {letter for _, row in drawn.layers for letter in row}
        keys: list[Artist] = [
            Patch(fc=fill, ec=INK, lw=0.6, label=words) for letter, (fill, words) in FILLS.items() if letter in used
        ]
        if drawn.carried is not None:
            arrow = {"linewidth": 1.1, "marker": ">", "markevery": [-1]}
            keys.append(Line2D([], [], color=INK, label="update carried over", **arrow))
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), handlelength=1.2)
        return render(figure, f"method-{method}", drawn.caption)


def _cell(axes: Axes, token: int, depth: int, letter: str) -> None:
    fill = FILLS[WORKED if letter in EXPERTS else letter][0]
    axes.add_patch(Rectangle((token + 0.06, depth + 0.1), 0.88, 0.8, fc=fill, ec=INK, lw=0.6))
    if letter in EXPERTS:
        axes.text(token + 0.5, depth + 0.48, letter, ha="center", va="center", size=7)
    if letter == KEPT:  # not by colour alone
        axes.plot([token + 0.5], [depth + 0.5], ".", color=INK, markersize=2.5)


def _carry(axes: Axes, depth: int, row: str) -> None:
    """Arrows from each processed token over the skipped ones after it."""
    for stretch in re.finditer(f"{WORKED}{re.escape(PASSED)}+", row):
        ends = (stretch.start() + 0.75, depth + 0.5), (stretch.end() - 0.25, depth + 0.5)
        axes.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1})


def _bracket(axes: Axes, x: float, first: int, last: int) -> None:
    low, high = first + 0.5, last + 0.5
    axes.plot([x - 0.15, x, x, x - 0.15], [low, low, high, high], color=INK, linewidth=1)
