"""The generated parts of docs/methods/: what each method is good and bad at, by the numbers of the comparison.

Whatever stands between `<!-- numbers: METHOD -->` or `<!-- figure: METHOD -->` and `<!-- end -->` is generated, the
numbers from results/; the rest of a page is written by hand. COMPARISON.md and all figures are made beside it:
python -m tokendepth.studies.pages
"""

import re
from pathlib import Path

from tokendepth.files import write_bytes
from tokendepth.report.figures import Drawing
from tokendepth.report.schematic import SCHEMATICS, schematic
from tokendepth.results import Row
from tokendepth.studies import comparison
from tokendepth.studies.comparison import beside, judge, table, wrapped
from tokendepth.studies.evidence import NOT_RUN, show
from tokendepth.studies.outcomes import OUTSIDE, Outcomes
from tokendepth.studies.settings import COMPARISONS, Setting
from tokendepth.studies.tradeoffs import LOOKS, draw

PART = re.compile(r"(<!-- (numbers|figure): (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CONTROLS = {"budget": ("random", "two_passes")}
"""Whose page shows controls too."""
NOTABLE = 0.05
"""A cost this far from the dense model's is worth a word."""


def render(text: str, all_outcomes: list[Outcomes], figures: dict[str, list[Drawing]]) -> str:
    """A page with its generated parts made anew; `figures` are each method's, how it works first."""

    def made(kind: str, method: str) -> str:
        first, *compared = (_picture(drawing) for drawing in figures[method])
        return first if kind == "figure" else "\n".join([_numbers(method, all_outcomes), *compared])

    return PART.sub(lambda m: m[1] + made(m[2], m[3]) + m[5], text)


def _picture(drawing: Drawing) -> str:
    return f"![](../figures/{drawing.name}.png)\n\n{wrapped(drawing.caption)}\n"


def _numbers(method: str, all_outcomes: list[Outcomes]) -> str:
    shown = [(outcomes, s) for outcomes in all_outcomes for s in _settings(outcomes, method)]
    parts = [_in_words(method, [(o, s) for o, s in shown if s.method == method])]
    titles = ["corpus", "setting", "loss", "dense, same FLOPs", "difference", "FLOPs / dense", "training FLOPs / dense",
              "parameters / dense", "K/V / dense", "speed"]  # fmt: skip
    rows = [[o.comparison.title, s.title, *_figures(o, s)] for o, s in shown]
    return "\n".join([*parts, table(titles, rows, words=2), f"{_ABOUT}\n"])


_ABOUT = wrapped(
    "Dense is the model with six layers. How each number is measured: [COMPARISON.md](../COMPARISON.md). "
    "`outside`: no dense model of 2 to 6 layers costs as much or as little."
)


def _settings(outcomes: Outcomes, method: str) -> list[Setting]:
    methods = (method, *CONTROLS.get(method, ()))
    return [setting for setting in outcomes.comparison.settings if setting.method in methods]


def _figures(outcomes: Outcomes, setting: Setting) -> list[str]:
    loss = outcomes.stat(setting, "loss")
    if loss is None:
        return [NOT_RUN, *[""] * 7]
    ratios = costs_to_dense(outcomes, setting)
    names = ("FLOPs", "training FLOPs", "parameters", "keys and values", "speed")
    return [show(loss), *beside(outcomes, setting), *(_ratio(ratios.get(name)) for name in names)]


def _ratio(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.2f}"


def costs_to_dense(outcomes: Outcomes, setting: Setting) -> dict[str, float]:
    """Each cost as a multiple of that of the dense model with six layers, as far as both are known."""
    first = outcomes.comparison.settings[0]
    found = {}
    for name, title in (("flops_per_token", "FLOPs"), ("parameters", "parameters")):
        mine, dense = outcomes.stat(setting, name), outcomes.stat(first, name)
        if mine and dense:
            found[title] = mine.mean / dense.mean
    cost, plain = outcomes.cost(setting), outcomes.cost(first)
    if cost and plain:
        found |= _cost_ratios(cost, plain)
    return found


def _cost_ratios(cost: Row, plain: Row) -> dict[str, float]:
    return {
        "training FLOPs": cost["training_flops_per_token"] / plain["training_flops_per_token"],
        "keys and values": cost["kv_bytes_per_token"] / plain["kv_bytes_per_token"],
        "speed": cost["time"]["speedup"],
    }


# --- in words ---------------------------------------------------------------------------------------------------------


def _in_words(method: str, shown: list[tuple[Outcomes, Setting]]) -> str:
    if method == "dense":
        return _best_layers(shown)
    good: list[str] = []
    bad: list[str] = []
    for outcomes, setting in shown:
        about = f"- {outcomes.comparison.title}, {setting.title}: "
        for lines, phrases in zip((good, bad), weigh(outcomes, setting), strict=True):
            lines += [wrapped(f"{about}{'; '.join(phrases)}.")] if phrases else []
    complete = all(outcomes.beside(setting) and outcomes.cost(setting) for outcomes, setting in shown)
    if not good and not bad:
        if complete:
            return "By our numbers it is as good as dense models of the same cost, and costs what they cost.\n"
        return "Not enough of it has run yet to say what it is good and bad at; the table shows what has.\n"
    parts = []
    for heading, lines in (("Good at, by our numbers.", good), ("Bad at, by our numbers.", bad)):
        nothing = "- Nothing that we measured." if complete else "- Nothing yet, and not all of it has run."
        words = "\n".join(lines) or nothing
        parts.append(f"**{heading}**\n\n{words}\n")
    return "\n".join(parts)


BESIDE = {
    "dense": "dense models of the same executed FLOPs",
    "two_passes": "models of the same executed FLOPs that were trained by two passes too",
}
WEIGHED = {
    "training FLOPs": "the dense FLOPs in training",
    "parameters": "the dense parameters",
    "keys and values": "the dense keys and values",
}


def weigh(outcomes: Outcomes, setting: Setting) -> tuple[list[str], list[str]]:
    """What speaks for a setting and what against it, by rule."""
    good: list[str] = []
    bad: list[str] = []
    for line, others in BESIDE.items():
        if line != "dense" and line not in CONTROLS.get(setting.method, ()):
            continue
        against = outcomes.beside(setting, line)
        if against is not None and against != OUTSIDE and (verdict := judge(against[1])) != "even":
            words = f"loss {against[1].text('+.2%')} against {others}"
            (good if verdict == "better" else bad).append(words)
    ratios = costs_to_dense(outcomes, setting)
    for name, words in WEIGHED.items():
        if abs(ratios.get(name, 1.0) - 1) > NOTABLE:
            (good if ratios[name] < 1 else bad).append(f"{ratios[name]:.2f} of {words}")
    if abs(ratios.get("speed", 1.0) - 1) > NOTABLE:
        words = f"{ratios['speed']:.2f} of the dense speed at {ratios['FLOPs']:.2f} of its FLOPs"
        (good if ratios["speed"] > 1 else bad).append(f"{words} ({_device(outcomes, setting)})")
    return good, bad


def _device(outcomes: Outcomes, setting: Setting) -> str:
    cost = outcomes.cost(setting)
    assert cost is not None, "what has a speed has costs"
    return cost["time"]["device"]


def _best_layers(shown: list[tuple[Outcomes, Setting]]) -> str:
    lines = []
    for title in dict.fromkeys(outcomes.comparison.title for outcomes, _ in shown):
        losses = [(loss.mean, s.title) for o, s in shown if o.comparison.title == title and (loss := o.stat(s, "loss"))]
        if losses:
            mean, best = min(losses)
            lines.append(f"{title}: {mean:.4f} with {best.removeprefix('dense, ')} is the best of those that ran.")
    return wrapped(" ".join(lines) or "Not run yet.") + "\n"


# --- writing ----------------------------------------------------------------------------------------------------------


def write(results: Path, docs: Path) -> None:
    """COMPARISON.md, the numbers of every page in methods/, and their figures."""
    comparison.write(results, docs / "COMPARISON.md")
    all_outcomes = [Outcomes.read(results, one) for one in COMPARISONS.values()]
    for method in SCHEMATICS:
        drawings = [schematic(method)]
        for outcomes in all_outcomes if method in LOOKS else []:
            ran = any(outcomes.stat(s, "loss") for s in outcomes.comparison.settings if s.method == method)
            if ran and (drawing := draw(outcomes, method)):
                drawings.append(drawing)
        for drawing in drawings:
            write_bytes(docs / "figures" / f"{drawing.name}.svg", drawing.svg)
            write_bytes(docs / "figures" / f"{drawing.name}.png", drawing.png)
        page = docs / "methods" / f"{method}.md"
        write_bytes(page, render(page.read_text(encoding="utf-8"), all_outcomes, {method: drawings}).encode())


if __name__ == "__main__":
    write(Path("results"), Path("docs"))
