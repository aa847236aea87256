"""Test loss over the time of training: dense models and span routing, each trained for several lengths."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from paper.spans import RULE
from paper.time_to_loss import Line, Times
from paper.tradeoffs import NAMES
from tokendepth.report import labels
from tokendepth.report.figures import WIDTH, Drawing, legend_below, legend_height, render, style
from tokendepth.report.palette import INK, look
from tokendepth.report.plots import Points, plot

TICKS = [n * 10**power for power in range(-3, 7) for n in (1, 2, 5)]
DASHES = ("dotted", "solid", "dashed", "dashdot")
"""Of dense models, those with fewer layers first."""


def draw(found: Sequence[Line], devices: dict[str, Times]) -> Drawing | None:
    """On the fastest device that was timed."""
    if not devices:
        return None
    device = min(devices, key=lambda name: min(devices[name].values()))
    times, series, words = devices[device], list[Points](), list[tuple[str, float, float]]()
    dashes = iter(DASHES)
    for line in (line for line in found if line.work in times):
        seconds = times[line.work] / 1000
        points = [(seconds * one.steps, one.loss.mean, one.loss.std or 0.0) for one in line.lengths]
        words += [(f"{one.steps // 1000}k", x, y) for one, (x, y, _) in zip(line.lengths, points, strict=True)]
        if line.method == RULE:
            series.append(Points(NAMES[RULE], points, look("span").colour, "D"))
        else:
            series.append(Points(line.title, points, look("dense").colour, "o", next(dashes)))
    if not series:
        return None
    with style():
        figure = Figure(figsize=(WIDTH, 3.0 + legend_height(one.label for one in series)), layout="constrained")
        axes = figure.subplots()
        handles = {one.label: plot(axes, one) for one in series}
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel(f"seconds of training, {device}")
        axes.set_ylabel("test loss, executed\n(nats per byte)")
        legend_below(figure, handles)
        labels.beside(axes, words, fontsize=7, color=INK)
        caption = (
            f"Test text of enwik8, bytes, width 256: loss over the time of training, which is steps times the time of "
            f"one step alone on its device ({device}). Each mark is a training of its own, with its thousands of steps "
            "beside it; bars are standard deviations over the seeds."
        )
        return render(figure, "loss-over-time-enwik8", caption)
