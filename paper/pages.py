"""The generated parts of docs/methods/: how each method compares with dense models, and its figures.

Everything between `<!-- numbers: METHOD -->`, `<!-- search: METHOD -->` or `<!-- figure: METHOD -->` and `<!-- end -->`
is generated from results/; the rest of a page is written by hand. `make readme` also makes COMPARISON.md and all
figures.
"""

import re
from collections.abc import Callable
from pathlib import Path

from paper import comparison, depth, tuned
from paper.comparison import EVEN, beside, judge, picture, table, wrapped
from paper.contenders import DECIDERS
from paper.evidence import NOT_RUN, show
from paper.outcomes import OUTSIDE, Outcomes
from paper.schematic import SCHEMATICS, schematic
from paper.search import Search
from paper.settings import SHAKESPEARE, Setting
from paper.shares import off, older
from paper.tradeoffs import draw
from tokendepth.config import SpanConfig
from tokendepth.report.figures import Drawing
from tokendepth.report.summary import DASH
from tokendepth.runs.files import write_bytes

PART = re.compile(r"(<!-- (numbers|figure): (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SEARCH = re.compile(r"(<!-- search: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEMBERS = {"span": tuple(f"span_{decider}" for decider in DECIDERS)}
"""Methods whose page is about several contenders; every other page is about the one with its name."""
CONTROLS = {"budget": ("random", "two_passes"), "span": ("span_dice",)}
"""Methods whose page also shows controls."""
COSTS = ("FLOPs", "training FLOPs", "parameters", "K/V", "speed")
"""Shown relative to the dense model with six layers."""
WORDS = ("corpus", "setting", "", "chosen")
"""Titles of the columns that hold words, which come first."""


def render(text: str, all_outcomes: list[Outcomes], figures: dict[str, list[Drawing]]) -> str:
    """A page with its generated parts made anew; of the `figures` of each method, the first shows how it works."""

    def made(kind: str, method: str) -> str:
        first, *compared = (picture(one.name, one.caption, "../figures") for one in figures[method])
        return first if kind == "figure" else "\n".join([_numbers(method, all_outcomes), *compared])

    return PART.sub(lambda m: m[1] + made(m[2], m[3]) + m[5], text)


def _numbers(method: str, all_outcomes: list[Outcomes]) -> str:
    shown = [(outcomes, s) for outcomes in all_outcomes for s in _settings(outcomes, method)]
    shape, title = _shape(shown)
    parts = [_in_words(method, [(o, s) for o, s in shown if s.method in MEMBERS.get(method, (method,))], title)]
    titles = ["corpus", "setting", "loss", "dense, same FLOPs", "difference", *(f"{cost} vs. dense" for cost in COSTS)]
    rows = [[o.comparison.title, title(s), *_figures(o, s)] for o, s in shown]
    about = _ABOUT_BYTES if method in MEMBERS else _ABOUT
    if any(OUTSIDE in row for row in rows):
        about += " `outside`: no dense model costs as much or as little."
    devices = sorted({cost["time"]["device"] for o, s in shown if (cost := o.cost(s))})
    if devices:
        about += f" Speeds are for {', '.join(devices)} without compiling; [SPEED.md](../SPEED.md) has others."
    old = _old_thresholds(all_outcomes) if method == "budget" else []
    return "\n".join([*parts, _telling(titles, rows, shape), *old, f"{wrapped(about)}\n"])


def _telling(titles: list[str], rows: list[list[str]], about: str = "") -> str:
    """A table without the columns that are the same in every row; those with a value are listed above it."""
    same = [n for n in range(len(titles)) if len(rows) > 1 and len({row[n] for row in rows}) == 1]
    listed = [f"{titles[n]} {rows[0][n]}" for n in same if rows[0][n] not in (NOT_RUN, DASH, "")]
    if listed:
        about = f"{about} Same in all rows: {'; '.join(listed)}.".lstrip()
    kept = [n for n in range(len(titles)) if n not in same]
    words = sum(1 for n in kept if titles[n] in WORDS)
    found = table([titles[n] for n in kept], [[row[n] for n in kept] for row in rows], words=words)
    return f"{wrapped(about)}\n\n{found}" if about else found


def _shape(shown: list[tuple[Outcomes, Setting]]) -> tuple[str, Callable[[Setting], str]]:
    """Where the span of all these models is, if it is the same; and their titles without it."""
    models = [(o.configs[s].method, o.configs[s].model.n_layer) for o, s in shown]
    spans = {(method.ranges(n_layer)[0], n_layer) for method, n_layer in models if isinstance(method, SpanConfig)}
    if len(spans) != 1:
        return "", lambda setting: setting.title
    ((blocks, n_layer),) = spans
    before, within, after = blocks.start, len(blocks), n_layer - blocks.stop
    words = f"All span models have {before} blocks before the span, {within} in it and {after} after it."
    return words, lambda setting: setting.title.removesuffix(f", {before} + {within} + {after} layers")


def _old_thresholds(all_outcomes: list[Outcomes]) -> list[str]:
    shares = {o.comparison.title: found for o in all_outcomes if older(found := o.shares())}
    if not shares:
        return []
    said = "; ".join(f"on {title} {off(found)}" for title, found in shares.items())
    return [wrapped(f"{older([one for found in shares.values() for one in found])} Their shares are {said}.") + "\n"]


_ABOUT_BYTES = (
    "Losses on enwik8 are on test text, and all methods were tuned with the same search there: "
    "[COMPARISON.md](../COMPARISON.md). Costs are relative to the dense model with six layers."
)
_ABOUT = f"{_ABOUT_BYTES} Losses on Tiny-Shakespeare are on validation text, and only budget routing was tuned there."


def _settings(outcomes: Outcomes, method: str) -> list[Setting]:
    methods = (*MEMBERS.get(method, (method,)), *CONTROLS.get(method, ()))
    return [setting for setting in outcomes.comparison.settings if setting.method in methods]


def _figures(outcomes: Outcomes, setting: Setting) -> list[str]:
    loss = outcomes.stat(setting, "loss")
    if loss is None:
        return [NOT_RUN, *[""] * 7]
    ratios = costs_to_dense(outcomes, setting)
    return [show(loss), *beside(outcomes, setting), *(_ratio(ratios.get(name)) for name in COSTS)]


def _ratio(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.2f}"


def costs_to_dense(outcomes: Outcomes, setting: Setting) -> dict[str, float]:
    """Each cost relative to the dense model with six layers, as far as both are known."""
    first = outcomes.comparison.settings[0]
    found = {}
    for name, title in (("flops_per_token", "FLOPs"), ("parameters", "parameters")):
        mine, dense = outcomes.stat(setting, name), outcomes.stat(first, name)
        if mine and dense:
            found[title] = mine.mean / dense.mean
    costs, dense = outcomes.costs_of(setting), outcomes.costs_of(first)
    if costs and dense:
        found |= {name: costs[name] / dense[name] for name in costs if name != "time"}
        if "time" in costs:
            found["speed"] = 1 / costs["time"]
    return found


# --- in words ---------------------------------------------------------------------------------------------------------


def _in_words(method: str, shown: list[tuple[Outcomes, Setting]], title: Callable[[Setting], str]) -> str:
    if method == "dense":
        return _best_layers(shown)
    found: dict[str, list[str]] = {"better": [], EVEN: [], "undecided": [], "worse": []}
    several = len({outcomes.comparison.title for outcomes, _ in shown}) > 1
    for outcomes, setting in shown:
        about = f"{outcomes.comparison.title}, {title(setting)}" if several else title(setting)
        for verdict, words in _verdicts(outcomes, setting):
            found[verdict].append(wrapped(f"- {about}: {words}."))
    if not any(found.values()):
        return "Not enough has run yet for a verdict; the table shows what has.\n"
    heads = {
        "better": "Better than dense models with the same executed FLOPs",
        EVEN: "No clear difference",
        "undecided": "Undecided (a single seed)",
        "worse": "Worse than dense models with the same executed FLOPs",
    }
    parts = []
    for verdict, lines in found.items():
        if lines:
            parts.append(f"**{heads[verdict]}:**\n\n" + "\n".join(lines) + "\n")
        elif verdict == "better":
            parts.append(f"**{heads[verdict]}:** nothing that we measured.\n")
    return "\n".join(parts)


def _verdicts(outcomes: Outcomes, setting: Setting) -> list[tuple[str, str]]:
    """Relative to dense models with the same executed FLOPs; if there are none, to the one with six layers."""
    against, found = outcomes.beside(setting), []
    if against == OUTSIDE:
        difference = outcomes.against_six_layers(setting)
        share = costs_to_dense(outcomes, setting)["FLOPs"]
        words = f", relative to the dense model with six layers, with {share:.2f} of its FLOPs"
    else:
        difference, words = against[1] if against else None, ""
    if difference is not None:
        found.append((judge(difference), f"loss {difference.text('+.2%')}{words}"))
    if setting.level != "any" and "two_passes" in CONTROLS.get(setting.method, ()):
        alike = outcomes.beside(setting, "two_passes")
        if alike is not None and alike != OUTSIDE:
            words = "relative to dense models that were also trained with two passes per step"
            found.append((judge(alike[1]), f"loss {alike[1].text('+.2%')} {words}"))
    return found


def _best_layers(shown: list[tuple[Outcomes, Setting]]) -> str:
    lines = []
    for title in dict.fromkeys(outcomes.comparison.title for outcomes, _ in shown):
        losses = [(loss.mean, s.title) for o, s in shown if o.comparison.title == title and (loss := o.stat(s, "loss"))]
        if losses:
            mean, best = min(losses)
            lines.append(f"{title}: the best loss is {mean:.4f}, with {best.removeprefix('dense, ')}.")
    return wrapped(" ".join(lines) or "Not run yet.") + "\n"


# --- writing ----------------------------------------------------------------------------------------------------------


def write(results: Path, docs: Path) -> None:
    """Write COMPARISON.md, the numbers of every page in methods/, and their figures."""
    comparison.write(results, docs / "COMPARISON.md")
    studied, _ = depth.outcomes(results)
    compared = [studied, Outcomes.read(results, SHAKESPEARE)]
    for method in SCHEMATICS:
        drawings, all_outcomes = [schematic(method)], [studied] if method in MEMBERS else compared
        for outcomes in all_outcomes if method != "dense" else []:
            members = MEMBERS.get(method, (method,))
            ran = any(outcomes.stat(s, "loss") for s in outcomes.comparison.settings if s.method in members)
            split = "test" if outcomes is studied else "validation"
            if ran and (drawing := draw(outcomes, *members, *CONTROLS.get(method, ()), split=split, page=method)):
                drawings.append(drawing)
        comparison.write_figures({drawing.name: drawing for drawing in drawings}, docs / "figures")
        page = docs / "methods" / f"{method}.md"
        text = render(page.read_text(encoding="utf-8"), all_outcomes, {method: drawings})
        write_bytes(page, SEARCH.sub(lambda m: m[1] + _searched(results, m[2]) + m[3], text).encode())


def _searched(results: Path, method: str) -> str:
    """The setting that the search chose for each contender of a method, on validation text."""
    found = Search.read(results)
    titles, rows = tuned.chosen(found, [one for one in found.tried if one.name in MEMBERS[method]])
    return _telling(titles, rows)
