"""The generated parts of docs/methods/: what each method is good and bad at, by the numbers of the comparison.

Whatever stands between `<!-- numbers: METHOD -->`, `<!-- search: METHOD -->` or `<!-- figure: METHOD -->` and
`<!-- end -->` is generated, the numbers from results/; the rest of a page is written by hand. `make readme` makes them,
COMPARISON.md and all figures.
"""

import re
from pathlib import Path

from paper import comparison, depth, depth_page
from paper.comparison import beside, judge, table, wrapped
from paper.contenders import DECIDERS
from paper.evidence import NOT_RUN, show
from paper.outcomes import OUTSIDE, Outcomes
from paper.schematic import SCHEMATICS, schematic
from paper.search import Search
from paper.settings import SHAKESPEARE, Setting
from paper.shares import off, older
from paper.tradeoffs import draw
from tokendepth.report.figures import Drawing
from tokendepth.report.summary import Stat
from tokendepth.runs.files import write_bytes

PART = re.compile(r"(<!-- (numbers|figure): (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SEARCH = re.compile(r"(<!-- search: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MEMBERS = {"span": tuple(f"span_{decider}" for decider in DECIDERS)}
"""Whose page is about several contenders; of every other method, the one of its name."""
CONTROLS = {"budget": ("random", "two_passes"), "span": ("span_dice",)}
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
    parts = [_in_words(method, [(o, s) for o, s in shown if s.method in MEMBERS.get(method, (method,))])]
    titles = ["corpus", "setting", "loss", "dense, same FLOPs", "difference", "FLOPs / dense", "training FLOPs / dense",
              "parameters / dense", "K/V / dense", "speed"]  # fmt: skip
    rows = [[o.comparison.title, s.title, *_figures(o, s)] for o, s in shown]
    devices = sorted({cost["time"]["device"] for o, s in shown if (cost := o.cost(s))})
    speeds = f" Speeds are of {', '.join(devices)}, op by op; [SPEED.md](../SPEED.md) has others." if devices else ""
    about = _ABOUT_BYTES if method in MEMBERS else _ABOUT
    old = _old_thresholds(all_outcomes) if method == "budget" else []
    return "\n".join([*parts, table(titles, rows, words=2), *old, f"{wrapped(about + speeds)}\n"])


def _old_thresholds(all_outcomes: list[Outcomes]) -> list[str]:
    shares = {o.comparison.title: found for o in all_outcomes if older(found := o.shares())}
    if not shares:
        return []
    said = "; ".join(f"on {title} {off(found)}" for title, found in shares.items())
    return [wrapped(f"{older([one for found in shares.values() for one in found])} Their shares are {said}.") + "\n"]


_ABOUT_BYTES = (
    "Losses on enwik8 are of test text, and every method was tuned alike there: "
    "[WHERE_DEPTH_PAYS.md](../WHERE_DEPTH_PAYS.md). In the table dense is the model with six layers. `outside`: no "
    "dense model costs as much or as little."
)
_ABOUT = (
    f"{_ABOUT_BYTES} Those on Tiny-Shakespeare are of validation text, and only budget routing was tuned: "
    "[COMPARISON.md](../COMPARISON.md)."
)


def _settings(outcomes: Outcomes, method: str) -> list[Setting]:
    methods = (*MEMBERS.get(method, (method,)), *CONTROLS.get(method, ()))
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
    costs, dense = outcomes.costs_of(setting), outcomes.costs_of(first)
    if costs and dense:
        found |= {name: costs[name] / dense[name] for name in costs if name != "time"}
        if "time" in costs:
            found["speed"] = 1 / costs["time"]
    return found


# --- in words ---------------------------------------------------------------------------------------------------------


def _in_words(method: str, shown: list[tuple[Outcomes, Setting]]) -> str:
    if method == "dense":
        return _best_layers(shown)
    good: list[str] = []
    bad: list[str] = []
    for outcomes, setting in shown:
        about = f"- {outcomes.comparison.title}, {setting.title}{_outside(outcomes, setting)}: "
        for lines, phrases in zip((good, bad), weigh(outcomes, setting), strict=True):
            lines += [wrapped(f"{about}{'; '.join(phrases)}.")] if phrases else []
    complete = bool(shown) and all(o.beside(setting) and o.costs_of(setting) for o, setting in shown)
    if not good and not bad:
        if complete:
            return "By our numbers it is as good as dense models of the same cost, and costs what they cost.\n"
        return "Not enough of it has run yet to say what it is good and bad at; the table shows what has.\n"
    parts = []
    for heading, lines in (("Good at", good), ("Bad at", bad)):
        nothing = "- Nothing that we measured." if complete else "- Nothing yet, and not all of it has run."
        words = "\n".join(lines) or nothing
        parts.append(f"**{heading}, by our numbers**, beside dense models of the same executed FLOPs:\n\n{words}\n")
    return "\n".join(parts)


def _outside(outcomes: Outcomes, setting: Setting) -> str:
    if outcomes.beside(setting) != OUTSIDE:
        return ""
    share = costs_to_dense(outcomes, setting)["FLOPs"]
    return f", at {share:.2f} of the FLOPs of the dense model with six layers, beside that"


def weigh(outcomes: Outcomes, setting: Setting) -> tuple[list[str], list[str]]:
    """What speaks for a setting and what against it, by rule, beside dense models of the same executed FLOPs.

    Where there are none, beside the one with six layers.
    """
    good: list[str] = []
    bad: list[str] = []
    against, flops = outcomes.beside(setting), outcomes.stat(setting, "flops_per_token")
    if against == OUTSIDE:
        difference = outcomes.against_six_layers(setting)
        dense = outcomes.costs_of(outcomes.comparison.settings[0])
    else:
        difference = against[1] if against else None
        dense = outcomes.dense_costs(flops.mean) if flops else None
    if difference is not None:
        _by_loss(difference, "", good, bad)
    if setting.level != "any" and "two_passes" in CONTROLS.get(setting.method, ()):
        alike = outcomes.beside(setting, "two_passes")
        if alike is not None and alike != OUTSIDE:
            _by_loss(alike[1], " beside those that were trained by two passes too", good, bad)
    mine = outcomes.costs_of(setting)
    if mine and dense:
        for name, ratio in ((name, mine[name] / dense[name]) for name in dense if name in mine):
            if abs(ratio - 1) > NOTABLE:
                words = f"{ratio:.2f} of the {name}" if name != "time" else f"{1 / ratio:.2f} of the speed"
                (good if ratio < 1 else bad).append(words)
    return good, bad


def _by_loss(difference: Stat, words: str, good: list[str], bad: list[str]) -> None:
    if (verdict := judge(difference)) in ("better", "worse"):
        (good if verdict == "better" else bad).append(f"loss {difference.text('+.2%')}{words}")


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
    tuned, _ = depth.outcomes(results)
    compared = [tuned, Outcomes.read(results, SHAKESPEARE)]
    for method in SCHEMATICS:
        drawings, all_outcomes = [schematic(method)], [tuned] if method in MEMBERS else compared
        for outcomes in all_outcomes if method != "dense" else []:
            members = MEMBERS.get(method, (method,))
            ran = any(outcomes.stat(s, "loss") for s in outcomes.comparison.settings if s.method in members)
            split = "test" if outcomes is tuned else "validation"
            if ran and (drawing := draw(outcomes, *members, *CONTROLS.get(method, ()), split=split, page=method)):
                drawings.append(drawing)
        for drawing in drawings:
            write_bytes(docs / "figures" / f"{drawing.name}.svg", drawing.svg)
            write_bytes(docs / "figures" / f"{drawing.name}.png", drawing.png)
        page = docs / "methods" / f"{method}.md"
        text = render(page.read_text(encoding="utf-8"), all_outcomes, {method: drawings})
        write_bytes(page, SEARCH.sub(lambda m: m[1] + _searched(results, m[2]) + m[3], text).encode())


def _searched(results: Path, method: str) -> str:
    """What the search chose for the contenders of a method, on validation text."""
    found = Search.read(results)
    return depth_page.choices(found, [one for one in found.tried if one.name in MEMBERS[method]])
