"""The figures of the TSA paper, with our results next to the published ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tokendepth.report.figures import SCALES, WIDTH, Drawing, legend_below, legend_height, render, style
from tokendepth.report.palette import ALARM, INK, look

GUIDE = "#7a828a"
"""Colour of reference lines."""


@dataclass(frozen=True)
class Points:
    """One line or cloud of a figure: `(x, y, spread of y)`, and how it is drawn."""

    label: str
    points: Sequence[tuple[float, float, float]]
    colour: str
    marker: str = "o"
    line: str | tuple = "solid"
    filled: bool = True


def plot(axes: Axes, series: Points) -> object:
    xs, ys, spreads = zip(*series.points, strict=True)
    size = 9 if series.marker == "*" else 4.5  # a star has little ink
    look = {"fillstyle": "full" if series.filled else "none", "markersize": size, "linewidth": 1.1, "capsize": 2}
    return axes.errorbar(
        xs,
        ys,
        spreads if any(spreads) else None,
        color=series.colour,
        marker=series.marker,
        linestyle=series.line,
        **look,
    )


def scatter(
    name: str,
    caption: str,
    y_label: str,
    panels: dict[str, list[Points]],
    *,
    marks: dict[str, float] | None = None,
    level: float | None = None,
) -> Drawing | None:
    """Panels over the active fraction with a common legend; `marks` are vertical lines, `level` is a horizontal one."""
    panels = {title: [s for s in series if s.points] for title, series in panels.items()}
    if not any(panels.values()):
        return None
    with style():
        legend = legend_height(s.label for series in panels.values() for s in series)
        figure = Figure(figsize=(WIDTH, 2.5 + legend), layout="constrained")
        handles: dict[str, object] = {}
        for axes, (title, series) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            for one in series:
                handles[one.label] = plot(axes, one)
            if len(panels) > 1:
                axes.set_title(title)
            for (word, x), side in zip((marks or {}).items(), ("right", "left"), strict=False):
                axes.axvline(x, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
                axes.annotate(word, (x, 1.01), xycoords=("data", "axes fraction"), fontsize=8, ha=side, va="bottom")
            if level is not None:
                axes.axhline(level, color=GUIDE, linewidth=0.8)
                axes.set_ylim(bottom=0)
            axes.set_xlim(0, 1.03)
            axes.set_xlabel("active fraction")
        figure.axes[0].set_ylabel(y_label)
        legend_below(figure, handles)
        return render(figure, name, caption)


def curves(name: str, caption: str, models: dict[tuple[str, str], list[list[dict]]]) -> Drawing | None:
    """Validation loss over steps and over cumulative TLOps, one line per seed; `models` by method and label."""
    models = {model: [h for h in histories if h] for model, histories in models.items()}
    if not any(models.values()):
        return None
    largest = max(row["tlops"] for histories in models.values() for history in histories for row in history)
    unit, scale = next((unit, scale) for unit, scale in SCALES if largest >= unit or unit == 1)
    with style():
        figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        handles: dict[str, object] = {}
        for ((method, label), histories), line in zip(models.items(), ("-", "--"), strict=False):
            for history in histories:
                losses = [row["val_loss"] for row in history]
                for axes, key, by in ((panels[0], "step", 1), (panels[1], "tlops", unit)):
                    xs = [row[key] / by for row in history]
                    drawn = axes.plot(xs, losses, color=look(method).colour, linestyle=line, linewidth=1.1)
                    handles[label] = drawn[0]
        final = [h[-1]["val_loss"] for histories in models.values() for h in histories]
        highest = max(h[0]["val_loss"] for histories in models.values() for h in histories)
        low = min(row["val_loss"] for histories in models.values() for h in histories for row in h)
        # The first validations would compress the rest, so they may be above the panel.
        top = min(highest, max(final) + 0.6)
        panels[0].set_ylim(low - 0.03 * (top - low), top + 0.03 * (top - low))
        panels[0].set_ylabel("validation loss, soft\n(nats per character)")
        panels[0].set_xlabel("optimiser step")
        panels[1].set_xlabel(f"cumulative TLOps ({scale}soft)")
        panels[0].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        for axes in panels:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(5))
        legend_below(figure, handles)
        return render(figure, name, caption)


def milestones(
    name: str,
    caption: str,
    rows: dict[tuple[str, str], list[list[int | None]]],
    levels: Sequence[str],
    steps: int,
    published: dict[tuple[str, str], int] | None = None,
) -> Drawing | None:
    """For each model and each loss level, the steps at which its seeds reached it; a cross means never.

    `rows` by method and label; `published` steps by label and level.
    """
    rows = {model: found for model, found in rows.items() if any(found)}
    if not rows:
        return None
    never = 1.1 * steps
    with style():
        figure = Figure(figsize=(WIDTH, 0.9 + 0.17 * len(rows) * len(levels)), layout="constrained")
        axes = figure.subplots()
        ticks, height = [], 0.0
        for (method, label), found in rows.items():
            for level, seeds in zip(levels, found, strict=True):
                ticks.append((height, f"{label}: {level}"))
                if said := (published or {}).get((label, level)):
                    axes.plot([said], [height], "d", color=INK, fillstyle="none", markersize=5.5)
                reached = [step for step in seeds if step is not None]
                axes.plot(reached, [height] * len(reached), "o", color=look(method).colour, markersize=4.5)
                if len(reached) < len(seeds):
                    axes.plot([never], [height], "x", color=ALARM, markersize=5, clip_on=False)
                height += 1
            height += 0.6
        axes.set_ylim(height - 0.6, -1)
        axes.set_yticks([place for place, _ in ticks], [words for _, words in ticks], fontsize=7.5)
        axes.set_xlim(0, 1.15 * steps)
        axes.axvline(never, color=GUIDE, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate("never", (never, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)
        axes.set_xlabel("first validation at or below the loss (step)")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        return render(figure, name, caption)
