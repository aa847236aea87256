"""Test loss over training time: dense models and span routing, each trained for several numbers of steps."""

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from paper.depth import Times
from paper.spans import RULE
from paper.time_to_loss import Line
from paper.tradeoffs import NAMES
from tokendepth.report import labels
from tokendepth.report.figures import WIDTH, Drawing, legend_below, legend_height, render, style
from tokendepth.report.palette import PAPER, look
from tokendepth.report.plots import Points, plot
from tokendepth.report.summary import Stat

TICKS = [n * 10**power for power in range(-3, 7) for n in (1, 2, 5)]
SHADES = ("#b3bac1", "#a0a7af", "#8c939b", "#6b737b", "#4b535b")
"""Of dense models: the deeper, the darker."""


def draw(found: Sequence[Line], devices: dict[str, Times]) -> Drawing | None:
    """For the device with the shortest steps."""
    if not devices:
        return None
    device = min(devices, key=lambda name: min(devices[name].values()))
    timed = [line for line in found if line.work in devices[device]]
    if not timed:
        return None
    shades, series, alone = itertools.cycle(SHADES), list[Points](), list[tuple[float, float]]()
    for line in timed:
        seconds = devices[device][line.work] / 1000
        losses = [Stat(tuple(seeds.values())) for seeds in line.losses.values()]
        points = [(seconds * n, loss.mean, loss.std or 0.0) for n, loss in zip(line.losses, losses, strict=True)]
        alone += [(x, y) for (x, y, _), loss in zip(points, losses, strict=True) if loss.std is None]
        if line.method == RULE:
            series.append(Points(NAMES[RULE], points, look("span").colour, "D"))
        else:
            series.append(Points(line.title, points, next(shades), "o"))
    with style():
        figure = Figure(figsize=(WIDTH, 3.0 + legend_height(one.label for one in series)), layout="constrained")
        axes = figure.subplots()
        handles = {one.label: plot(axes, one) for one in series}
        for x, y in alone:  # hollow
            axes.plot([x], [y], marker="o", markersize=2.4, color=PAPER, zorder=3)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel(f"seconds of training, {device}")
        axes.set_ylabel("test loss with real skipping\n(nats per byte)")
        legend_below(figure, handles)
        words = [
            (f"{steps // 1000}k", x, y, one.colour)
            for line, one in zip(timed, series, strict=True)
            for steps, (x, y, _) in zip(line.losses, one.points, strict=True)
        ]
        labels.beside(axes, words, fontsize=7)
        caption = (
            f"enwik8, bytes, width 256: test loss over training time on {device} (steps times time per step). Each "
            "mark is a separate training run, labelled with its thousands of steps. Bars: standard deviation over "
            "seeds. Hollow: one seed."
        )
        return render(figure, "loss-over-time-enwik8", caption)
