"""docs/WHERE_DEPTH_GOES.md: what trained routers spend depth on, made from results/analysis.json.

python -m paper analyse runs/s0 runs/s1 runs/s2 --model shakespeare
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN
from tokendepth.analysis import analyse
from tokendepth.analysis.summary import NUMBERS, direction, shown
from tokendepth.analysis.windows import Estimate
from tokendepth.config import to_dict
from tokendepth.report.summary import DASH
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.runs.run import Run

ROWS = "analysis.json"
MODELS = {"shakespeare": "Tiny-Shakespeare", "enwik8": "enwik8", "retrofitted": "a retrofitted model"}
SEEDS = 3
DIGITS = 6
HEAD = """\
# Where the depth goes: what trained routers do

How each number is measured, and how far to trust it: [ANALYSE.md](ANALYSE.md). This page is made by `make readme` from
`analysis.json` in [results/](../results/), which `python -m paper analyse RUN... --model NAME` fills. What has no row
yet is `not run`.
"""


def add(name: str, runs: Sequence[Path], results: Path, **how: Any) -> None:
    """Analyse the runs; the row replaces an earlier one of the same model."""
    tree = analyse(runs, **how, show=True)
    config = to_dict(Run.open(runs[0]).config)
    add_rows(results / ROWS, [{"name": name, "config": config, **kept(tree)}], identity=("name",))


def kept(tree: Any) -> Any:
    """What a committed row holds: six digits, and of tokens grouped by a number only the depth over all sites."""
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
    """Of every router whose decision varies."""
    return lambda row: [
        site[name] for run in row["runs"] for site in run["lookup"] if site["share"]["value"] is not None
    ]


def _unexplained(row: Row) -> list[Estimate]:
    """Of the entropy of each router's decision, what the token leaves open."""
    return [_difference({"value": 1.0, "low": 1.0, "high": 1.0}, share) for share in _routers("share")(row)]


def _locality(row: Row) -> list[Estimate]:
    """How many more decisions flip on the token after a replaced one than on the farthest."""
    return [_difference(run["stability"][0]["flips"], run["stability"][-1]["flips"]) for run in row["runs"]]


def _difference(one: Estimate, other: Estimate) -> Estimate:
    """With an interval that holds whatever the two have to do with each other."""

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
        for group, who in (("first", "the first of a word"), ("last", "the last of a word"))
    ),
    (
        "the token alone helps a table to foretell a decision",
        "a table by token foretells decisions worse than a constant",
        _routers("gain_of_token"),
        "+.1%",
    ),
    (
        "the token before helps such a table further",
        "the token before makes such a table worse",
        _routers("gain_of_previous"),
        "+.1%",
    ),
    (
        "the token leaves a part of every decision open: no router is a lookup table",
        "the token says more than there is to say",
        _unexplained,
        ".0%",
    ),
    (
        "a replaced token changes the decision on the next one more often than on the farthest",
        "a replaced token changes far decisions more often than near ones",
        _locality,
        "+.1%",
    ),
    ("seeds agree more than chance", "seeds agree less than chance", _kappas, ".2f"),
    ("skipping costs loss", "skipping lowers the loss", _cost, "+.4f"),
)
"""In words if the figure is above zero and if it is below, where it is found, its format."""


def finding(question: Question, rows: Sequence[Row]) -> str | None:
    """The question's answer, if it is the same in every seed of every model."""
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
        "A range is over seeds, and over routers where each has its figure; * marks what has an interval that excludes "
        "zero in all of them, on the same side."
    )
    models = [_section(title, by_name.get(name)) for name, title in MODELS.items()]
    parts = [HEAD, f"## What holds\n\n{_holds(rows)}\n", table(["", *MODELS.values()], lines), f"{wrapped(note)}\n"]
    return "\n".join([*parts, *models])


def _holds(rows: Sequence[Row]) -> str:
    complete = len(rows) == len(MODELS) and all(len(row["runs"]) >= SEEDS for row in rows)
    if not complete:
        return f"In every seed of every model: {NOT_RUN}; {len(MODELS)} models with {SEEDS} seeds each are asked for."
    found = [words for question in QUESTIONS if (words := finding(question, rows))]
    said = "".join(f"- {words}\n" for words in found) or "- nothing that is asked here\n"
    return f"In every seed of every model:\n\n{said}"


def _section(title: str, row: Row | None) -> str:
    if row is None:
        return f"## {title}\n\n{NOT_RUN}\n"
    few = len(row["runs"])
    warning = f"\n{few} of {SEEDS} seeds: nothing here is known to hold over seeds.\n" if few < SEEDS else ""
    return f"## {title}\n{warning}\n" + "".join(f"- {sentence}\n" for sentence in row["summary"])


def write(results: Path, path: Path) -> Path:
    source = results / ROWS
    with disk_faults(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, document(rows_so_far(source)).encode())
    return path
