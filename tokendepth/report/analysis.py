"""Writes the results of `tokendepth analyse` to a folder: summary, tables and figures, as Markdown and as HTML."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendepth.errors import UserError
from tokendepth.report.folder import check_extra
from tokendepth.report.summary import DASH, Stat
from tokendepth.report.tables import piped, plain
from tokendepth.runs.files import disk_faults, write_bytes, write_json

Tree = dict[str, Any]
FIGURES = ("analysis_kinds", "analysis_numbers", "analysis_stability", "analysis_skipped")
LABELS = {"kind": "kind of token", "position in word": "position in the word"}


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    head: list[str]
    rows: list[list[str]]
    words: int = 1
    """How many of the first columns contain words instead of numbers."""


def write_analysis(tree: Tree, out: Path) -> Path:
    """Write analysis.html, analysis.md, analysis.json and figures/ into `out`; returns the path of analysis.html."""
    out = Path(out)
    if os.path.isfile(out):
        raise UserError(f"{out} is a file; expected a folder for the analysis; choose another --out")
    check_extra()
    from tokendepth.report import page
    from tokendepth.report.analysis_figures import figures

    drawings, shown = figures(tree), tables(tree)
    title = f"Where {tree['method']} spends its depth"
    html = page.ENVIRONMENT.get_template("analysis.html").render(
        title=title, tree=tree, tables=shown, figures=[page.inlined(drawing) for drawing in drawings], **page.COLOURS
    )
    folder = out / "figures"
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:  # remove those of an earlier analysis, which would seem to belong to this one
            for suffix in ("svg", "png"):
                (folder / f"{name}.{suffix}").unlink(missing_ok=True)
    for drawing in drawings:
        write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
        write_bytes(folder / f"{drawing.name}.png", drawing.png)
    pictures = [f"![](figures/{drawing.name}.png)\n\n{plain(drawing.caption)}\n" for drawing in drawings]
    sentences = [f"- {plain(sentence)}\n" for sentence in tree["summary"]]
    parts = [f"# {title}\n", "".join(sentences), *pictures, *map(markdown, shown)]
    write_bytes(out / "analysis.md", "\n".join(parts).encode(errors="replace"))
    write_json(out / "analysis.json", tree)
    write_bytes(out / "analysis.html", html.encode(errors="replace"))
    return out / "analysis.html"


def markdown(table: Table) -> str:
    aligned = ["---" if n < table.words else "--:" for n in range(len(table.head))]
    lines = [[plain(cell) for cell in row] for row in (table.head, *table.rows)]
    return f"## {table.title}\n\n{plain(table.note)}\n\n{piped([lines[0], aligned, *lines[1:]])}"


def cell(estimates: Sequence[dict[str, float | None]], form: str) -> str:
    """For one seed the value and its interval; for several the mean ± standard deviation over seeds."""
    values = tuple(one["value"] for one in estimates if one["value"] is not None)
    if not values:
        return DASH
    low, high = estimates[0]["low"], estimates[0]["high"]
    if len(estimates) > 1 or low is None or high is None:
        return Stat(values).text(form)
    return f"{values[0]:{form}} ({low:{form}} to {high:{form}})"


def tables(tree: Tree) -> list[Table]:
    """Every table of the page."""
    runs, sites = tree["runs"], tree["runs"][0]["sites"]
    several = f"mean ± standard deviation over {len(runs)} seeds" if len(runs) > 1 else "with its 95% interval"
    found = [_groups(runs, sites, name, several) for name in LABELS]
    found += [_correlations(runs, sites, several), _lookups(runs, sites, several), _stability(runs, sites, several)]
    found += [_skipped(runs, several)] if all(run["skipped"] is not None for run in runs) else []
    return found + ([_agreement(tree, sites)] if tree["agreement"] else [])


def _over(runs: list[Tree], *keys: Any) -> list[dict[str, float | None]]:
    """The estimate of every seed under these keys."""
    found = []
    for value in runs:
        for key in keys:
            value = value[key]
        found.append(value)
    return found


def _groups(runs: list[Tree], sites: list[str], name: str, several: str) -> Table:
    by_group: dict[str, list[Tree]] = {}
    for run in runs:
        for row in run["by"][name]["groups"]:
            by_group.setdefault(row["group"], []).append(row)
    rows = []
    for group, members in by_group.items():
        layers = [cell(_over(members, "per_site", n), ".3f") for n in range(len(sites))]
        depth = [cell(_over(members, key), form) for key, form in (("depth", ".3f"), ("difference", "+.3f"))]
        rows.append([group, f"{members[0]['share']:.1%}", *depth, *layers])
    note = f"Depth is the share of routed blocks that process a token; each block's own share follows; {several}."
    return Table(
        f"Depth by {LABELS[name]}", note, ["group", "share of tokens", "depth", "minus all others", *sites], rows
    )


def _correlations(runs: list[Tree], sites: list[str], several: str) -> Table:
    names = [name for name, found in runs[0]["by"].items() if "rank_correlation" in found]
    rows = [
        [
            name,
            cell(_over(runs, "by", name, "rank_correlation"), "+.2f"),
            *(cell(_over(runs, "by", name, "rank_correlation_per_site", n), "+.2f") for n in range(len(sites))),
        ]
        for name in names
    ]
    note = f"Spearman's rank correlation of each attribute with depth, and with each block's decision; {several}."
    return Table("What depth correlates with", note, ["attribute", "depth", *sites], rows)


def _lookups(runs: list[Tree], sites: list[str], several: str) -> Table:
    columns = {
        "share": ".0%",
        "by_nothing": ".1%",
        "by_token": ".1%",
        "by_pair": ".1%",
        "gain_of_previous": "+.1%",
    }
    rows = []
    for n, site in enumerate(sites):
        bits = Stat(tuple(run["lookup"][n]["entropy"] for run in runs)).text(".2f")
        chance = [run["lookup"][n]["chance"] for run in runs if run["lookup"][n]["chance"] is not None]
        cells = {name: cell(_over(runs, "lookup", n, name), form) for name, form in columns.items()}
        rows.append([site, bits, cells.pop("share"), f"{max(chance):.1%}" if chance else DASH, *cells.values()])
    note = (
        "How much of the entropy of a router's decision the token explains, beyond what it would explain by chance; "
        f"and how often a lookup table predicts the decision on held-out text; {several}."
    )
    head = ["router", "entropy (bits)", "token explains", "chance", "constant guess", "by token"]
    return Table(
        "Is it a lookup table?", note, [*head, "by token and preceding token", "gain from preceding token"], rows
    )


def _stability(runs: list[Tree], sites: list[str], several: str) -> Table:
    rows = []
    for n, row in enumerate(runs[0]["stability"]):
        distance = f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"
        layers = [cell(_over(runs, "stability", n, "per_site", site), ".2%") for site in range(len(sites))]
        rows.append([distance, cell(_over(runs, "stability", n, "flips"), ".2%"), *layers])
    note = f"One token in each window is replaced: the share of later decisions that flip, by distance; {several}."
    return Table("How stable decisions are", note, ["distance", "all routers", *sites], rows)


def _skipped(runs: list[Tree], several: str) -> Table:
    by_kind: dict[str, list[Tree]] = {}
    for run in runs:
        for row in run["skipped"]:
            by_kind.setdefault(row["kind"], []).append(row)
    columns = {"skipped": ".1%", "loss": "+.4f", "loss_where_skipped": "+.4f"}
    rows = [
        [kind, f"{members[0]['tokens']:,}", *(cell(_over(members, name), form) for name, form in columns.items())]
        for kind, members in by_kind.items()
    ]
    note = (
        "Loss on the next token with skipping, minus the loss with every token active everywhere, in nats. Other "
        f"tokens are skipped, too, so the difference is not caused by this token alone; {several}."
    )
    head = ["kind", "tokens", "skipped somewhere", "loss difference", "loss difference if skipped"]
    return Table("What skipping costs", note, head, rows)


def _agreement(tree: Tree, sites: list[str]) -> Table:
    rows = []
    for pair in tree["agreement"]:
        for site, found in zip(sites, pair["per_site"], strict=True):
            numbers = [
                cell([found[name]], form) for name, form in (("agree", ".1%"), ("chance", ".1%"), ("kappa", ".2f"))
            ]
            rows.append([" and ".join(map(str, pair["seeds"])), site, *numbers])
    note = "How often two seeds make the same decision, and would by chance, and Cohen's kappa; 95% intervals."
    return Table("Do seeds agree?", note, ["seeds", "router", "same decision", "chance", "kappa"], rows, words=2)
