"""docs/WHERE_DEPTH_GOES.md: which tokens trained routers spend depth on, from results/analysis.json.

python -m paper analyse runs/s0 runs/s1 runs/s2 --model shakespeare
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN
from paper.retrofit import base_title
from tokendepth.analysis import analyse
from tokendepth.analysis.summary import NUMBERS, direction, shown, summarise
from tokendepth.analysis.windows import Estimate
from tokendepth.config import to_dict
from tokendepth.report.summary import DASH
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.runs.run import Run

ROWS = "analysis.json"
MODELS = {"shakespeare": "Tiny-Shakespeare", "enwik8": "enwik8", "retrofitted": "Retrofitted model"}
SEEDS = 3
DIGITS = 6
HEAD = """\
# Where the depth goes: what trained routers do

Which tokens do trained routers send through more blocks? What holds in every seed of every model comes first, then all
numbers, then each model. [ANALYSE.md](ANALYSE.md) explains how each number is measured and how far to trust it.
"""
MADE = """\
`make readme` generates this page from `analysis.json` in [results/](../results/), which `python -m paper analyse RUN...
--model NAME` fills. What has no row yet is `not run`.
"""


def add(name: str, runs: Sequence[Path], results: Path, **how: Any) -> None:
    """Analyse the runs and add the row; it replaces an earlier one of the same model."""
    tree = analyse(runs, **how, show=True)
    config = to_dict(Run.open(runs[0]).config)
    add_rows(results / ROWS, [{"name": name, "config": config, **kept(tree)}], identity=("name",))


def kept(tree: Any) -> Any:
    """What a committed row keeps: six digits, and for tokens grouped by a number only the depth over all sites."""
    if isinstance(tree, float):
        return float(f"{tree:.{DIGITS}g}")
    if isinstance(tree, list):
        return [kept(value) for value in tree]
    if not isinstance(tree, dict):
        return tree
    return {key: kept(value) for key, value in tree.items() if not (key == "per_site" and "mean" in tree)}


# --- what holds -------------------------------------------------------------------------------------------------------


def _correlation(name: str) -> Callable[[Row], list[Estimate]]:
    return lambda row: [run["by"][name]["rank_correlation"] for run in row["runs"]]


def _group(attribute: str, group: str) -> Callable[[Row], list[Estimate]]:
    def pick(row: Row) -> list[Estimate]:
        groups = [one for run in row["runs"] for one in run["by"][attribute]["groups"]]
        return [one["difference"] for one in groups if one["group"] == group]

    return pick


def _routers(name: str) -> Callable[[Row], list[Estimate]]:
    """For every router whose decision varies."""
    return lambda row: [
        site[name] for run in row["runs"] for site in run["lookup"] if site["share"]["value"] is not None
    ]


def _unexplained(row: Row) -> list[Estimate]:
    """The share of the entropy of each router's decision that the token does not explain."""
    return [_difference({"value": 1.0, "low": 1.0, "high": 1.0}, share) for share in _routers("share")(row)]


def _locality(row: Row) -> list[Estimate]:
    """How many more decisions flip for the token after a replaced one than for the most distant one."""
    return [_difference(run["stability"][0]["flips"], run["stability"][-1]["flips"]) for run in row["runs"]]


def _difference(one: Estimate, other: Estimate) -> Estimate:
    """With an interval that holds however the two are correlated."""

    def less(end: str, opposite: str) -> float | None:
        ours, theirs = one[end], other[opposite]
        return None if ours is None or theirs is None else ours - theirs

    return {"value": less("value", "value"), "low": less("low", "high"), "high": less("high", "low")}


def _kappas(row: Row) -> list[Estimate]:
    return [site["kappa"] for pair in row["agreement"] for site in pair["per_site"]]


def _cost(row: Row) -> list[Estimate]:
    return [one["loss"] for run in row["runs"] for one in run["skipped"] or [] if one["kind"] == "all"]


Question = tuple[str, str, Callable[[Row], list[Estimate]], str]
QUESTIONS: tuple[Question, ...] = (
    *((f"{who} get more depth", f"{who} get less depth", _correlation(name), "+.2f") for name, who in NUMBERS.items()),
    *(
        (f"{who} gets more depth", f"{who} gets less depth", _group("position in word", group), "+.3f")
        for group, who in (("first", "the first token of a word"), ("last", "the last token of a word"))
    ),
    (
        "knowing the token helps to predict a router's decision",
        "knowing the token makes predictions of decisions worse",
        _routers("gain_of_token"),
        "+.1%",
    ),
    (
        "knowing the previous token as well helps further",
        "knowing the previous token as well makes it worse",
        _routers("gain_of_previous"),
        "+.1%",
    ),
    (
        "the token alone does not determine a decision: no router is a lookup table",
        "the token explains more than the whole decision",
        _unexplained,
        ".0%",
    ),
    (
        "replacing a token changes the decision for the next one more often than for the most distant one",
        "replacing a token changes distant decisions more often than near ones",
        _locality,
        "+.1%",
    ),
    ("seeds agree more than by chance", "seeds agree less than by chance", _kappas, ".2f"),
    ("skipping raises the loss", "skipping lowers the loss", _cost, "+.4f"),
)
"""The words for a number above zero and for one below, where to find it, and its format."""


def finding(question: Question, rows: Sequence[Row]) -> str | None:
    """The answer, if it is the same in every seed of every model."""
    above, below, pick, _ = question
    signs = {direction(pick(row)) for row in rows}
    return {1: above, -1: below, 0: None}[signs.pop()] if len(signs) == 1 else None


def document(rows: Sequence[Row]) -> str:
    by_name = {row["name"]: row for row in rows}
    lines = []
    for question in QUESTIONS:
        cells = []
        for name in MODELS:
            estimates = question[2](by_name[name]) if name in by_name else []
            mark = " *" if direction(estimates) else ""
            absent = DASH if name in by_name else NOT_RUN
            cells.append(shown(estimates, question[3]) + mark if estimates else absent)
        lines.append([question[0], *cells])
    note = (
        "Ranges are over seeds, and over routers if each has its own number. * means that the 95% intervals of all of "
        "them exclude zero, on the same side. The numbers are: rank correlations with depth (first five rows), "
        "differences in depth (next two), additional decisions that a lookup table predicts correctly (next two), the "
        "share of a decision's entropy that the token does not explain, additional decisions that flip, Cohen's kappa, "
        "and nats per token."
    )
    models = [_section(title, by_name.get(name)) for name, title in MODELS.items()]
    parts = [
        HEAD,
        f"## What holds\n\n{_holds(rows)}",
        table(["", *MODELS.values()], lines),
        f"{wrapped(note)}\n\n{MADE}",
    ]
    return "\n".join([*parts, *models])


def _holds(rows: Sequence[Row]) -> str:
    complete = len(rows) == len(MODELS) and all(len(row["runs"]) >= SEEDS for row in rows)
    if not complete:
        return f"In every seed of every model: {NOT_RUN}; {len(MODELS)} models with {SEEDS} seeds each are required.\n"
    found = [words for question in QUESTIONS if (words := finding(question, rows))]
    said = "".join(f"- {words}\n" for words in found) or "- none of the statements below\n"
    return f"In every seed of every model:\n\n{said}"


def _section(title: str, row: Row | None) -> str:
    if row is None:
        return f"## {title}\n\n{NOT_RUN}\n"
    few = len(row["runs"])
    warning = f"\n{few} of {SEEDS} seeds: it is not known whether anything here holds for other seeds.\n"
    retrofit = row["config"].get("retrofit")
    base = f", {base_title(Path(retrofit['base']).name)}" if retrofit else ""
    sentences = "".join(f"{wrapped(f'- {sentence}')}\n" for sentence in summarise(row))
    return f"## {title}{base}\n{warning if few < SEEDS else ''}\n{sentences}"


def write(results: Path, path: Path) -> Path:
    source = results / ROWS
    with disk_faults(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, document(rows_so_far(source)).encode())
    return path
