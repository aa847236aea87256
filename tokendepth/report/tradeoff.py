"""Many methods in one figure: loss over executed FLOPs, with dense models as the line to beat."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from tokendepth.report import labels
from tokendepth.report.figures import WIDTH, Drawing, legend_below, legend_height, render, style
from tokendepth.report.palette import INK, look
from tokendepth.report.plots import Points

Place = tuple[float, float, float]
"""FLOPs per token, loss, and its standard deviation over the seeds."""
Outside = tuple[float, str, str]
"""For a point above the frame: FLOPs per token, label and colour."""
PALE = "#c9ced3"
BY_LAYERS = "dense, by layers"
"""Name of the grey line; its points are labelled with their number of layers."""
HEADROOM = 0.06
"""The frame ends this far above the best dense loss; higher points would compress the rest."""
MARGIN = 0.01
"""But at least this far above the worst dense loss, so that the whole line to beat is visible."""
TICKS = [n * 10**power for power in range(3, 14) for n in (1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8)]


def tradeoff(
    name: str,
    caption: str,
    dense: Sequence[tuple[str, Place]],
    series: Sequence[Points],
    highlight: tuple[str, ...] = (),
    split: str = "validation",
    cost: str = "million executed FLOPs per token (including head and routers)",
) -> Drawing | None:
    """`dense` are the labelled points of the grey line, which set the frame; without them it shows everything.

    With `highlight`, series whose labels do not begin with one of these words are pale. `split` names the text, `cost`
    the x axis, which is in millions.
    """
    series = [one for one in series if one.points]
    if not series:
        return None
    with style():
        legend = legend_height([BY_LAYERS, *(one.label for one in series if _shown(one, highlight))])
        figure = Figure(figsize=(WIDTH, 3.0 + legend), layout="constrained")
        axes = figure.subplots()
        losses = [loss for _, (_, loss, _) in dense] or [loss for one in series for _, loss, _ in one.points]
        top = max((1 + HEADROOM) * min(losses), (1 + MARGIN) * max(losses))
        words = BY_LAYERS if len(dense) > 1 else "dense"
        handles: dict[str, object] = {words: _dense(axes, dense)} if dense else {}
        outside: list[Outside] = []
        for one in sorted(series, key=lambda one: _shown(one, highlight)):  # highlighted series are drawn on top
            handle, above = _draw(axes, one, top, pale=not _shown(one, highlight))
            if _shown(one, highlight):
                handles.setdefault(one.label, handle)
                short = one.label.split(",")[0]
                outside += [(x, f"{short} {y:.2f}", one.colour) for x, y in above]
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.03 * (high - low), min(high, top))  # room for labels below
        axes.set_xscale("log")
        left, right = axes.get_xlim()
        axes.set_xlim(0.9 * left, 1.08 * right)  # room for labels next to the first and last point
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}")
        axes.set_xlabel(cost)
        axes.set_ylabel(f"{split} loss with real skipping\n(nats per token)")
        legend_below(figure, handles)
        figure.set_figheight(figure.get_figheight() + labels.above(axes, outside, top, fontsize=7))
        labels.beside(axes, [(words, x, y, INK) for words, (x, y, _) in dense], fontsize=7)
        return render(figure, name, caption)


def _shown(one: Points, highlight: tuple[str, ...]) -> bool:
    return not highlight or one.label.startswith(highlight)


def _dense(axes: Axes, dense: Sequence[tuple[str, Place]]) -> object:
    xs, ys, spreads = zip(*sorted(place for _, place in dense), strict=True)
    bars = spreads if any(spreads) else None
    return axes.errorbar(xs, ys, bars, color=look("dense").colour, marker="o", markersize=4, capsize=2, linewidth=1.2)


def _draw(axes: Axes, one: Points, top: float, *, pale: bool) -> tuple[object, list[tuple[float, float]]]:
    """Draw one series. Points above the frame are drawn on its edge and returned, to be labelled."""
    colour = PALE if pale else one.colour
    mark = {"color": colour, "marker": one.marker, "fillstyle": "full" if one.filled else "none", "markersize": 5.5}
    inside = [place for place in one.points if place[1] <= top]
    above = [place for place in one.points if place[1] > top]
    drawn = None
    if inside:
        xs, ys, spreads = zip(*inside, strict=True)
        bars = spreads if any(spreads) else None
        drawn = axes.errorbar(xs, ys, bars, linestyle=one.line, linewidth=1.2, capsize=2, **mark)
    on_the_edge = [(x, y) for x, y, _ in (above if one.line == "none" else above[-1:])]  # where a line leaves
    for x, _ in on_the_edge:
        (edge,) = axes.plot([x], [top], linestyle="none", clip_on=False, **mark)
        drawn = drawn or edge
    return drawn, on_the_edge
