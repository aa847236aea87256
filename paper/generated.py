"""The generated parts of README.md and docs/: everything between `<!-- KIND: FILE -->` and `<!-- end -->`.

Each is made from FILE, a path from the root of the repository; their figures go to docs/figures/.
"""

import re
from dataclasses import replace
from pathlib import Path

from benchmarks import serving, speculation
from benchmarks.faults.registry import FAULTS
from benchmarks.speed import headline
from paper import api_page, readme
from tokendepth.config import BudgetConfig
from tokendepth.report.results import at_budgets, records
from tokendepth.report.summary import DASH, Stat, group
from tokendepth.report.summary import Row as TableRow
from tokendepth.report.tables import markdown_table
from tokendepth.runs.files import write_bytes
from tokendepth.runs.results import Row, read_rows, rows_so_far

PAGES = ("README.md", "docs/RESULTS.md", "docs/RELIABILITY.md", "docs/API.md", "docs/SERVE.md", "docs/SPECULATION.md")
KINDS = "summary|findings|results|headline|paper|training|faults|api|serve|speculation"
PART = re.compile(rf"(<!-- ({KINDS}): (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, root: Path) -> str:
    """`text` with every generated part made anew from the files under `root`."""
    makers = {
        "summary": readme.table,
        "findings": readme.findings,
        "results": lambda path: markdown_table(group(at_budgets(records(path))), brief=True),
        "headline": lambda path: headline([row for row in read_rows(path) if row["positions"] == "trained"]),
        "paper": _paper_table,
        "training": _training_table,
        "faults": _faults_table,
        "api": lambda path: api_page.api(),
        "serve": lambda path: serving.table(read_rows(path)),
        "speculation": lambda path: speculation.table(rows_so_far(path)),
    }
    return PART.sub(lambda m: m[1] + makers[m[2]](root / m[3]) + m[5], text)


PAPER = {
    ("Tiny-Shakespeare", "loss"): ("shakespeare", {"baseline": "dense", "TSA": "tsa-depth_penalty=0.001"}),
    ("enwik8", "loss"): ("enwik8", {"baseline": "dense", "TSA": "tsa"}),
    ("copy", "accuracy"): ("synthetic", {"copy baseline": "copy_dense", "copy TSA": "copy_tsa"}),
    ("sort", "accuracy"): ("synthetic", {"sort baseline": "sort_dense", "sort TSA": "sort_tsa"}),
}
"""The paper's tasks and what is measured: its table and the rows in it, each with the run that reproduces it."""


def _paper_table(path: Path) -> str:
    """The paper's main tables: published numbers compared with ours, soft and with skipping."""
    titles = ["task", "model", "published", "TLOps saved, published", "ours, soft", "TLOps saved, soft"]
    lines = [f"| {' | '.join([*titles, 'ours, with skipping', 'work skipped'])} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    ours = {re.sub(r"-seed\d+$", "", row.label): row for row in group(records(path))}
    seeds = []
    for (task, measure), (table, rows) in PAPER.items():
        for published in read_rows(Path(__file__).with_name("paper.json")):
            if published["table"] != table or published["row"] not in rows:
                continue
            saved = f"{published['tlops_saved']:.1%}" if "tlops_saved" in published else DASH
            model = "TSA" if published["row"].endswith("TSA") else "dense"
            cells = [f"{task}, {measure}", model, f"{published[measure]:.4f}", saved]
            found = ours.get(f"{table}.{rows[published['row']]}")
            if found is None:
                lines.append(f"| {' | '.join([*cells, *['not run'] * 4])} |")
                continue
            keys = [f"soft.{measure}", "tlops_saved_soft", f"hard.{measure}", "tlops_skipped"]
            stats = [Stat(tuple(record.needed(*key.split(".")) for record in found.records)) for key in keys]
            cells += [stat.text(".4f" if n % 2 == 0 else ".1%") for n, stat in enumerate(stats)]
            lines.append(f"| {' | '.join(cells)} |")
            seeds.append(len(found.records))
    many = "no" if not seeds else f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    return "\n".join(lines) + f"\n\nMean ± standard deviation over {many} seeds of this command.\n"


def _training_table(path: Path) -> str:
    lines = ["| device | shape | dense ms | TSA ms | TSA / dense |", "|---|---|--:|--:|--:|"]
    lines += [_training_line(row) for row in read_rows(path) if row["benchmark"] == "training step"]
    for row in read_rows(path):
        if row["benchmark"] == "whole run":
            run = f"{row['recipe']}, {row['steps']:,} steps on {row['device']}: {row['seconds']:.1f} s"
            steps = f"the steps alone about {row['seconds_stepping']:.1f} s at their median rate"
            start = (
                f", after {row['seconds_start']:.1f} s that a process takes to start" if "seconds_start" in row else ""
            )
            lines.append(f"\n{run}, validation and checkpoints included{start}; {steps}.")
    return "\n".join(lines) + "\n"


def _training_line(row: Row) -> str:
    times = ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in ("dense_ms", "tsa_ms")]
    ratio = "{:.3f} ({:.3f} to {:.3f})".format(*row["ratio"])
    return f"| {row['device']}, {row['dtype']} | {row['shape']} | {times[0]} | {times[1]} | {ratio} |"


def _faults_table(path: Path) -> str:
    """With the results for another trainer, which are in their own file."""
    others = {row["fault"]: row for row in read_rows(path.with_name("faults_baseline.json"))}
    (trainer,) = {row["trainer"] for row in others.values()}
    lines = [f"| fault | tried | outcome | {trainer} |", "|---|--:|---|---|"]
    lines += [_fault_line(row, others.get(row["fault"], {}).get("outcome", DASH)) for row in read_rows(path)]
    return "\n".join(lines) + "\n"


def _fault_line(row: Row, other: str) -> str:
    """In the current words of the suite; rows of faults that it no longer has keep the words they were written with."""
    fault = FAULTS.get(row["fault"])
    title, claim = (row["title"], row["claim"]) if fault is None else (fault.title, fault.claim)
    outcome = claim if not row["failed"] else f"**{row['failed']} failures**, otherwise: {claim}"
    shown = re.compile("difference|slowest|flips|growth|minutes")
    differences = [f"{name} {value:.2g}" for name, value in row["figures"].items() if shown.search(name)]
    where = [] if row["device"].startswith("CPU") else [row["device"]]
    notes = "; ".join(differences + where)
    return f"| {title} | {row['attempts']:,} | {outcome}{f' ({notes})' if notes else ''} | {other} |"


def _readable(table: list[TableRow]) -> list[TableRow]:
    """Rows named by their method, and by budget and layers if a method has several."""
    names = {"tsa": "Token-Selective Attention", "budget": "budget routing", "random": "random routing"}
    kinds = [row.kind for row in table]
    readable = []
    for row in table:
        config, label = row.records[0].config, names.get(row.kind, row.label)
        if kinds.count(row.kind) > 1 and isinstance(config.method, BudgetConfig):
            layers = f", {config.model.n_layer} layers" if config.model.n_layer != 6 else ""
            label += f" at {config.method.budget:g}{layers}"
        readable.append(replace(row, label=label))
    return readable


def draw(root: Path) -> None:
    """The figures of README.md, RESULTS.md and BUDGET.md."""
    from tokendepth.report.pareto import pareto

    (root / "docs/figures").mkdir(exist_ok=True)
    for corpus in ("shakespeare", "enwik8", "enwik8_faster"):
        path = root / f"results/{corpus}.json"
        if not path.exists():
            continue
        (drawing,) = pareto(_readable(group(records(path))))
        write_bytes(root / f"docs/figures/pareto-{corpus}.svg", drawing.svg)
        write_bytes(root / f"docs/figures/pareto-{corpus}.png", drawing.png)


def write(root: Path) -> None:
    """Make the generated parts and their figures anew."""
    draw(root)
    for name in PAGES:
        page = root / name
        write_bytes(page, render(page.read_text(encoding="utf-8"), root).encode())
