"""Figures of an analysis: depth by kind and layer, depth by numeric attribute, flips by distance, cost of skipping."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from tokendepth.report.figures import WIDTH, Drawing, legend_below, legend_height, render, style, wrapped
from tokendepth.report.heatmap import SHADES
from tokendepth.report.palette import DASHES, INK, MARKERS, look
from tokendepth.report.plots import GUIDE

Tree = dict[str, Any]
Estimate = dict[str, float | None]


def figures(tree: Tree) -> list[Drawing]:
    with style():
        drawn = [kinds(tree), numbers(tree), stability(tree), skipped(tree)]
    return [drawing for drawing in drawn if drawing]


def _looks(tree: Tree) -> list[dict[str, Any]]:
    """One look per seed: the method's colour, with a different marker and dash."""
    colour, marker = look(tree["method"]).colour, look(tree["method"]).marker
    markers = [marker, *(other for other in MARKERS if other != marker)]
    return [
        {"color": colour, "marker": markers[n % len(markers)], "linestyle": DASHES[n % len(DASHES)], "markersize": 4,
         "linewidth": 1.1, "capsize": 2}
        for n, _ in enumerate(tree["runs"])
    ]  # fmt: skip


def _bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of the error bars, below and above; 0 if the interval is unknown."""
    below, above = [], []
    for one in estimates:
        value, low, high = one["value"], one["low"], one["high"]
        if value is None or low is None or high is None:
            value = low = high = 0.0
        below.append(max(0.0, value - low))
        above.append(max(0.0, high - value))
    return [below, above]


def _legend(figure: Figure, tree: Tree) -> None:
    keys = {
        f"seed {run['seed']}": Line2D([], [], **_key(at)) for run, at in zip(tree["runs"], _looks(tree), strict=True)
    }
    legend_below(figure, keys)


def _key(at: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in at.items() if name != "capsize"}


def kinds(tree: Tree) -> Drawing:
    """One cell per group and router, averaged over seeds."""
    names, found = ("kind", "position in word"), {}
    for run in tree["runs"]:
        for name in names:
            for row in run["by"][name]["groups"]:
                found.setdefault((name, row["group"]), []).append(
                    [one["value"] for one in (*row["per_site"], row["depth"])]
                )
    grid = [[sum(column) / len(column) for column in zip(*rows, strict=True)] for rows in found.values()]
    columns = [*tree["runs"][0]["sites"], "mean"]
    figure = Figure(figsize=(WIDTH, 0.55 + 0.24 * len(grid)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(grid, SHADES, vmin=0, vmax=1, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), [wrapped(column, 8) for column in columns])
    axes.set_yticks(range(len(grid)), [group for _, group in found])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", size=8)
    first = sum(name == names[0] for name, _ in found)
    axes.axhline(first - 0.5, color=INK, linewidth=0.8)
    axes.axvline(len(columns) - 1.5, color=INK, linewidth=0.8)
    caption = (
        "Share of tokens that each router keeps active, by kind of token and, below the line, by position in the word"
        + (f"; mean over {len(tree['runs'])} seeds." if len(tree["runs"]) > 1 else ".")
    )
    return render(figure, "analysis_kinds", caption)


def numbers(tree: Tree) -> Drawing:
    """Depth over tokens sorted by a numeric attribute, one panel for each."""
    names = [name for name, found in tree["runs"][0]["by"].items() if "rank_correlation" in found]
    down = -(-len(names) // 2)
    figure = Figure(figsize=(WIDTH, 1.6 * down + legend_height(["seed"])), layout="constrained")
    panels = figure.subplots(down, 2, squeeze=False, sharey=True)
    for axes, name in zip(panels.flat, names, strict=False):
        for run, at in zip(tree["runs"], _looks(tree), strict=True):
            rows = run["by"][name]["groups"]
            total, before, xs = sum(row["share"] for row in rows), 0.0, []
            for row in rows:
                xs.append((before + row["share"] / 2) / total)
                before += row["share"]
            depths = [row["depth"] for row in rows]
            axes.errorbar(xs, [one["value"] for one in depths], _bars(depths), **at)
        axes.set_title(name)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    for place, axes in enumerate(panels.flat):
        axes.set_visible(place < len(names))
    for axes in panels[:, 0]:
        axes.set_ylabel("depth")
    for axes in (panels.flat[len(names) - 2], panels.flat[len(names) - 1]):  # the lowest of each column
        axes.set_xlabel("tokens, lowest to highest")
    _legend(figure, tree)
    caption = (
        "Depth of tokens, sorted by the attribute named above each panel; bars are 95% intervals. Some tokens are so "
        "frequent that a point may represent more than a tenth of all tokens."
    )
    return render(figure, "analysis_numbers", caption)


def stability(tree: Tree) -> Drawing:
    figure = Figure(figsize=(WIDTH, 2.2 + legend_height(["seed"])), layout="constrained")
    axes = figure.subplots()
    for run, at in zip(tree["runs"], _looks(tree), strict=True):
        flips = [row["flips"] for row in run["stability"]]
        xs = [(row["from"] * row["to"]) ** 0.5 for row in run["stability"]]
        axes.errorbar(xs, [one["value"] for one in flips], _bars(flips), **at)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("distance from the replaced token, in tokens")
    axes.set_ylabel("decisions that flip")
    _legend(figure, tree)
    caption = "One token in each window is replaced by another: share of later decisions that flip; 95% intervals."
    return render(figure, "analysis_stability", caption)


def skipped(tree: Tree) -> Drawing | None:
    if any(run["skipped"] is None for run in tree["runs"]):
        return None
    kinds = list(dict.fromkeys(row["kind"] for run in tree["runs"] for row in run["skipped"]))
    figure = Figure(figsize=(WIDTH, 0.9 + 0.26 * len(kinds) + legend_height(["seed"])), layout="constrained")
    axes = figure.subplots()
    for n, (run, at) in enumerate(zip(tree["runs"], _looks(tree), strict=True)):
        found = {row["kind"]: row["loss_where_skipped"] for row in run["skipped"]}
        here = [kind for kind in kinds if found.get(kind, {}).get("value") is not None]
        offset = 0.16 * (n - (len(tree["runs"]) - 1) / 2)
        estimates = [found[kind] for kind in here]
        places = [kinds.index(kind) + offset for kind in here]
        points = {**at, "linestyle": "none", "elinewidth": 1.1}
        axes.errorbar([one["value"] for one in estimates], places, xerr=_bars(estimates), **points)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.axvline(0, color=GUIDE, linewidth=0.9)
    axes.set_xlabel("loss with skipping minus loss with every token active (nats)")
    _legend(figure, tree)
    caption = (
        "How much the loss on the next token rises, for tokens that were skipped somewhere; 95% intervals if there are "
        "enough tokens."
    )
    return render(figure, "analysis_skipped", caption)
