"""The generated parts of README.md and docs/: what stands between `<!-- KIND: FILE -->` and `<!-- end -->`.

Each is made from FILE, a path from the root of the repository; the figures beside them go to docs/figures/.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tokendepth
from benchmarks import serving, speculation
from benchmarks.speed import headline
from paper import depth, spans
from paper.equal_loss import Place, Ratio, at_its_loss, pass_times
from paper.grid import same_work
from paper.outcomes import Outcomes
from paper.retrofit_page import Base, bases, block_flops, loss, untouched_loss
from paper.wanted import Runs
from tokendepth.config import BudgetConfig
from tokendepth.report.records import Record
from tokendepth.report.results import at_budgets, records
from tokendepth.report.summary import DASH, Stat, group
from tokendepth.report.summary import Row as TableRow
from tokendepth.report.tables import markdown_table, piped
from tokendepth.runs.files import write_bytes
from tokendepth.runs.results import Row, read_rows, rows_so_far

PAGES = ("README.md", "docs/RESULTS.md", "docs/RELIABILITY.md", "docs/API.md", "docs/SERVE.md", "docs/SPECULATION.md")
KINDS = "summary|results|headline|paper|training|faults|api|serve|speculation"
PART = re.compile(rf"(<!-- ({KINDS}): (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, root: Path) -> str:
    """`text` with every generated part made anew from the files under `root`."""
    makers = {
        "summary": _summary,
        "results": lambda path: markdown_table(group(at_budgets(records(path))), brief=True),
        "headline": lambda path: headline([row for row in read_rows(path) if row["positions"] == "trained"]),
        "paper": _paper_table,
        "training": _training_table,
        "faults": _faults_table,
        "api": lambda path: _api(),
        "serve": lambda path: serving.table(read_rows(path)),
        "speculation": lambda path: speculation.table(rows_so_far(path)),
    }
    return PART.sub(lambda m: m[1] + makers[m[2]](root / m[3]) + m[5], text)


SUMMARY = (("Tiny-Shakespeare", "shakespeare"),)
STUDIED = {
    "tsa": "Token-Selective Attention",
    "budget": "budget routing",
    "mod": "Mixture-of-Depths",
    "span_rule": "span, taken where words end",
    "span_taught": "span, boundaries that were taught that",
}
"""Contenders of docs/WHERE_DEPTH_PAYS.md, beside its dense model with six layers."""
CLOCKS = (
    ("two cores, batch 1", "CPU", 1),
    ("two cores, batch 8", "CPU", 8),
    ("H200, batch 8", "NVIDIA", 8),
    ("H200, batch 64", "NVIDIA", 64),
)


def _summary(results: Path) -> str:
    """The README's one table: what was skipped, the loss and what the same FLOPs give without a router, the clock."""
    titles = ["text", "model", "parameters", "FLOPs skipped", "loss", "same FLOPs, no router", *(c[0] for c in CLOCKS)]
    lines = [titles, ["---", "---", *("--:" for _ in titles[2:])]]
    timed = [row for row in read_rows(results / "forward.json") if row["positions"] == "trained"]
    for text, name in SUMMARY:
        runs = Runs.read(results / f"{name}.json")
        models = {
            ("dense, six layers", "dense", None): runs.dense(),
            ("Token-Selective Attention, as in the paper", "tsa", None): runs.of("tsa"),
            ("budget routing at 0.4", "budget", 0.4): runs.budget(0.4),
        }
        for (title, method, asked), found in models.items():
            dense = method == "dense"
            clocks = [
                DASH if dense else _speed(timed, f"{name}.{method}", kind, batch, asked) for _, kind, batch in CLOCKS
            ]
            lines.append([text, title, *_cells(runs, found, dense=dense), *clocks])
            text = ""
    lines += _studied(results)
    return piped([*lines, *(line for base in bases(results / "retrofit.json") for line in _retrofitted(base, timed))])


def _studied(results: Path) -> list[list[str]]:
    """Methods that were tuned alike; their speed is that at which dense models of the same loss run."""
    found, made = depth.outcomes(results)
    lines, timed = [], pass_times(results)
    for entry in made:
        six = entry == made[0]
        if six or entry.setting.method in STUDIED:
            layers = "" if six else f", {entry.config.model.n_layer} layers"
            title = "dense, six layers" if six else STUDIED[entry.setting.method] + layers
            clocks = [_speed_at_its_loss(found, entry, made, timed, kind, batch) for _, kind, batch in CLOCKS]
            lines.append(["" if lines else "enwik8", title, *_quality(found, entry), *clocks])
    found, made = spans.outcomes_at(results, spans.FOURTEEN_TIMES)
    for entry, name in ((one, STUDIED.get(one.setting.method, "dense, six layers")) for one in made):
        lines.append(["", f"{name}, {spans.FOURTEEN_TIMES.title}", *_quality(found, entry), *[DASH] * len(CLOCKS)])
    return lines


def _quality(found: Outcomes, entry: depth.Entry) -> list[str]:
    """Parameters, the share of FLOPs that is skipped, the loss, and that of dense models of the same FLOPs."""
    skipped, loss = (found.stat(entry.setting, name) for name in ("flops_skipped", "loss"))
    if loss is None or skipped is None:
        return [DASH, *["not run"] * 2, DASH]
    against, parameters = found.beside(entry.setting), found.stat(entry.setting, "parameters")
    same = against[0].text(".3f") if isinstance(against, tuple) and entry.setting.method != "dense" else DASH
    return [_millions(parameters), f"{skipped.mean:.0%}", loss.text(".3f"), same]


def _millions(parameters: Stat | None) -> str:
    return DASH if parameters is None else f"{parameters.mean / 1e6:.1f}M"


def _speed_at_its_loss(
    found: Outcomes, entry: depth.Entry, made: list[depth.Entry], timed: dict[Place, depth.Times], kind: str, batch: int
) -> str:
    if entry.setting.method == "dense" or found.stat(entry.setting, "loss") is None:
        return DASH
    there = [
        times
        for (device, size), times in timed.items()
        if size == batch and (device.endswith(" 2 threads") if kind == "CPU" else not device.startswith("CPU"))
    ]
    costs = {one.setting: times[work] for one in made for times in there if (work := same_work(one.config)) in times}
    ratio = at_its_loss(found, entry, made, costs.get)
    return ratio.speedup if isinstance(ratio, Ratio) else DASH


RETROFITTED = 0.7
"""Of the block FLOPs."""


def _retrofitted(base: Base, timed: list[Row]) -> list[list[str]]:
    """A model that people have, with a router and without, beside the same with blocks dropped."""

    def of(name: str, budget: float | None, pick: Callable[[Row], float | None], form: str = "") -> str:
        found = base.stat(name, budget, pick)
        if found is None:
            return "not run"
        return format(found.mean, form) if form else found.text(".3f")

    def size(name: str, budget: float | None) -> str:
        return _millions(base.stat(name, budget, lambda row: row["evaluation"]["parameters"]))

    costs = base.values("span", RETROFITTED, block_flops)
    dropped = [base.at_cost("drop", seed, cost) for seed, cost in costs.items()]
    numbers = tuple(value for value in dropped if isinstance(value, float))
    same = Stat(numbers).text(".3f") if numbers and len(numbers) == len(dropped) else DASH
    skipped = of("span", RETROFITTED, lambda row: row["evaluation"]["flops_skipped"], ".0%")
    clocks = [_speed(timed, f"{base.name}-span-{RETROFITTED:g}", kind, batch) for _, kind, batch in CLOCKS]
    routed = [size("span", RETROFITTED), skipped, of("span", RETROFITTED, loss), same, *clocks]
    dense, none = size("dense", None), [DASH] * (1 + len(CLOCKS))
    return [
        ["wiki text", f"{base.name}, as it is", dense, "0%", of("dense", None, untouched_loss, ".3f"), *none],
        ["", f"{base.name}, trained on it", dense, "0%", of("dense", None, loss), *none],
        ["", f"{base.name} with a router, trained on it", *routed],
    ]


def _cells(runs: Runs, found: dict[int, Record], *, dense: bool) -> list[str]:
    loss, skipped = (
        Stat(tuple(r.needed(*key) for r in found.values())) for key in (("hard", "loss"), ("flops_skipped",))
    )
    beside = [runs.dense_at(seed, record.needed("flops_per_token")) for seed, record in found.items()]
    numbers = tuple(value for value in beside if isinstance(value, float))
    same = Stat(numbers).text(".3f") if len(numbers) == len(beside) and not dense else DASH
    parameters = Stat(tuple(r.needed("parameters") for r in found.values()))
    return [_millions(parameters), f"{skipped.mean:.0%}".replace("-0%", "0%"), loss.text(".3f"), same]


def _speed(timed: list[Row], run: str, kind: str, batch: int, asked: float | None = None) -> str:
    """Of the one checkpoint that was timed on such a device; at whatever budget, where none is named."""
    found = [
        row["speedup"]
        for row in timed
        if (row["run"], row["batch"]) == (run, batch)
        and asked in (None, row["asked"])
        and row["device"].startswith(kind)
        and row["execution"] == "sparse"
    ]
    return f"{found[0]:.2f}x" if found else DASH


def _api() -> str:
    """Every public name, as its docstring tells it."""
    parts = []
    for name in sorted(tokendepth.__all__, key=lambda name: (name[0].isupper(), name)):  # functions first
        thing = getattr(tokendepth, name)
        words, _, example = (inspect.getdoc(thing) or "").partition(">>> ")
        functions = {name: thing}
        if inspect.ismodule(thing):  # what its functions do stands behind the module's own words
            functions = {f"{name}.{each}": getattr(thing, each) for each in thing.__all__}
            words = "\n\n".join([words.strip(), *(f"`{n}`: {inspect.getdoc(each)}" for n, each in functions.items())])
        lines = "".join(f"{_call(n, each)}\n" for n, each in functions.items() if not inspect.isclass(each))
        signature = f"```python\n{lines}```\n\n" if lines else ""
        example = textwrap.dedent(f">>> {example}").strip()
        parts.append(f"### `{name}`\n\n{signature}{words.strip()}\n\n```pycon\n{example}\n```\n")
    return "\n".join(parts)


def _call(name: str, function: Callable) -> str:
    """On one line, or with a line for each argument."""
    text = f"td.{name}{_signature(function)}"
    if len(text) <= 100:
        return text
    start, rest = text.split("(", 1)
    arguments, end = rest.rsplit(")", 1)
    return "\n".join([f"{start}(", *(f"    {one}," for one in re.split(r", (?=\*, |\w+: )", arguments)), f"){end}"])


class _AsWritten(str):
    __repr__ = str.__str__


def _signature(function: Callable) -> str:
    """Without the modules that types live in; what stands for long private types as the source has it."""
    signature = inspect.signature(function)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    given = {one.arg: one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg) and one.annotation}
    types = {
        one.name: _AsWritten(ast.unparse(given[one.name]))
        for one in signature.parameters.values()
        if "._" in str(one.annotation)
    }
    named = [one.replace(annotation=types.get(one.name, one.annotation)) for one in signature.parameters.values()]
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z])|~", r"\1", str(signature.replace(parameters=named)))


PAPER = {
    ("Tiny-Shakespeare", "loss"): ("shakespeare", {"baseline": "dense", "TSA": "tsa-depth_penalty=0.001"}),
    ("enwik8", "loss"): ("enwik8", {"baseline": "dense", "TSA": "tsa"}),
    ("copy", "accuracy"): ("synthetic", {"copy baseline": "copy_dense", "copy TSA": "copy_tsa"}),
    ("sort", "accuracy"): ("synthetic", {"sort baseline": "sort_dense", "sort TSA": "sort_tsa"}),
}
"""The paper's tasks and what is measured: its table and the rows in it, each with the run that repeats it."""


def _paper_table(path: Path) -> str:
    """The paper's main tables, as published beside what their models are worth when they are executed."""
    titles = ["task", "model", "published", "TLOps saved, published", "ours, soft", "TLOps saved, soft"]
    lines = [f"| {' | '.join([*titles, 'ours, executed', 'work skipped'])} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
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
    """Beside what was measured for another trainer, in a file of its own."""
    others = {row["fault"]: row for row in read_rows(path.with_name("faults_baseline.json"))}
    (trainer,) = {row["trainer"] for row in others.values()}
    lines = [f"| fault | tried | outcome | {trainer} |", "|---|--:|---|---|"]
    lines += [_fault_line(row, others.get(row["fault"], {}).get("outcome", DASH)) for row in read_rows(path)]
    return "\n".join(lines) + "\n"


def _fault_line(row: Row, other: str) -> str:
    outcome = row["claim"] if not row["failed"] else f"**{row['failed']} failures**, else: {row['claim']}"
    shown = re.compile("difference|slowest|flips|growth|minutes")
    differences = [f"{name} {value:.2g}" for name, value in row["figures"].items() if shown.search(name)]
    where = [] if row["device"].startswith("CPU") else [row["device"]]
    notes = "; ".join(differences + where)
    return f"| {row['title']} | {row['attempts']:,} | {outcome}{f' ({notes})' if notes else ''} | {other} |"


def _readable(table: list[TableRow]) -> list[TableRow]:
    """Rows named by their method, and by budget and layers where a method has several."""
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
