"""Loss over the FLOPs that were executed: what a budget buys, with the controls that cost the same."""

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokendepth.report.figures import WIDTH, Drawing, legend_below, render, shorten, style
from tokendepth.report.palette import INK, colour
from tokendepth.report.summary import Row

Point = tuple[float, float, float]
"""MFLOPs per token, mean loss, standard deviation over the seeds (0 for one)."""


def pareto(table: list[Row]) -> Drawing | None:
    """One panel per corpus; none where no row was executed at more than one cost."""
    corpora = list(dict.fromkeys(row.corpus for row in table if len(_points(row)) > 1))
    if not corpora:
        return None
    with style():
        return _drawn(table, corpora)


def _drawn(table: list[Row], corpora: list[str]) -> Drawing:
    figure = Figure(figsize=(WIDTH, 3.0 * len(corpora) + 0.6), layout="constrained")
    panels = figure.subplots(len(corpora), squeeze=False)[:, 0]
    handles: dict[str, object] = {}
    for axes, corpus in zip(panels, corpora, strict=True):
        members = [(i, row) for i, row in enumerate(table) if row.corpus == corpus and _points(row)]
        dense = [row for _, row in members if row.method == "dense"]
        if dense:
            handles["dense, fewer layers (the control)"] = _dense(axes, dense)
        for i, row in members:
            if row.method != "dense":
                handles[row.title] = _routed(axes, row, colour(i))
        axes.set_ylabel("validation loss, executed\n(nats per token)")
        if len(corpora) > 1:
            axes.set_title(shorten(corpus, 60))
    panels[-1].set_xlabel("million FLOPs per token, executed (head and routers included)")
    legend_below(figure, handles)
    caption = (
        "Validation loss over the FLOPs that were executed. A line is one model per seed, executed at several budgets; "
        "bars and bands are standard deviations over the seeds. The grey line joins dense models with fewer layers."
    )
    return render(figure, "pareto", caption)


def _points(row: Row) -> list[Point]:
    """One for each budget of the curve; for a row without one, what it was evaluated at."""
    curves = [record.field("curve") or [] for record in row.records]
    if all(curves):
        by_budget = [
            [(p["flops_per_token"], p["sparse"]["loss"]) for p in points] for points in zip(*curves, strict=True)
        ]
    else:
        cost, loss = ("flops_per_token",), ("sparse", "loss")
        by_budget = [[(r.number(*cost), r.number(*loss)) for r in row.records if r.number(*cost) and r.number(*loss)]]
    return [_mean(pairs) for pairs in by_budget if pairs]


def _mean(pairs: list) -> Point:
    costs, losses = zip(*pairs, strict=True)
    return statistics.fmean(costs) / 1e6, statistics.fmean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0


def _dense(axes: Axes, rows: list[Row]) -> object:
    points = sorted((*_points(row)[0], row.records[0].config.model.n_layer) for row in rows)
    xs, ys, spreads, layers = zip(*points, strict=True)
    for x, y, number in zip(xs, ys, layers, strict=True):
        axes.annotate(f"{number} layers", (x, y), textcoords="offset points", xytext=(4, 5), fontsize=7, color=INK)
    return axes.errorbar(xs, ys, spreads, color="#7a828a", marker="o", markersize=4, capsize=2, linewidth=1)


def _routed(axes: Axes, row: Row, hue: str) -> object:
    xs, ys, spreads = zip(*sorted(_points(row)), strict=True)
    if len(xs) == 1:
        return axes.errorbar(xs, ys, spreads, color=hue, marker="s", markersize=4, capsize=2, linestyle="none")
    low, high = zip(*((y - s, y + s) for y, s in zip(ys, spreads, strict=True)), strict=True)
    axes.fill_between(xs, low, high, color=hue, alpha=0.15, linewidth=0)
    return axes.plot(xs, ys, color=hue, marker="o", markersize=3.5)[0]
