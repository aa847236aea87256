"""Commands about many runs, or about this machine."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from tokendepth.cli.commands.one import LOADING
from tokendepth.errors import UserError
from tokendepth.progress import Progress


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate a grid of runs, several at once. What is finished is not repeated: call it until it is done.

    A cell of the grid is a recipe and what to vary in it: shakespeare.dense:model.n-layer=2,3,4
    """

    grid: tyro.conf.Positional[tuple[str, ...]]
    """Recipes, each with its overrides after colons, values apart by commas."""
    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU; on a cluster what it holds."""
    on: str = "local"
    """Where: local, or ray:HOST:PORT, or ray for the Ray cluster that this machine belongs to; see docs/CLUSTER.md."""
    curve: bool = False
    """Also execute budget-routed runs at budgets from 0.2 to 1, those with exits at a row of thresholds."""
    out: Path = Path("runs/sweep")
    """Folder of the run folders."""
    results: Path | None = None
    """Also add the runs' figures to this results file."""

    def __call__(self) -> None:
        from rich.console import Console

        from tokendepth.recipes import variants
        from tokendepth.report import collect, terminal_table
        from tokendepth.training.sweep import sweep

        if not self.grid:
            raise UserError(
                "sweep was given no recipes; expected at least one, as in: tokendepth sweep shakespeare.tsa"
            )
        configs = {}
        for cell in self.grid:
            configs |= variants(cell, self.seeds)
        outcome = sweep(configs, self.out, on=self.on, workers=self.workers, curve=self.curve)
        if outcome.runs:
            Console().print(terminal_table(outcome.runs))
            if self.results:
                collect(outcome.runs, self.results)
        for name, words in outcome.failed.items():
            print(f"tokendepth: {name} failed: {words}", file=sys.stderr)
        if outcome.failed:
            sys.exit(1)


@dataclass(frozen=True)
class Bench:
    """Time this machine: what skipping gives in a forward pass, what adaptive depth costs in training."""

    what: tyro.conf.Positional[Literal["forward", "training"]]
    """forward: passes that skip against dense ones. training: steps of TSA and of skipping against dense ones."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""
    out: Path = Path("runs/bench")
    """Folder of forward.json and training.json; a row takes the place of one that was measured the same way."""
    json: bool = False
    """Print one JSON object a line instead of words."""
    fractions: str | None = None
    """Of forward: active fractions of random decisions, with commas between them."""
    batches: str | None = None
    """Of forward: sequences in a pass, with commas between them."""
    run: Path | None = None
    """Of forward: a trained run that decides for itself on its validation text, instead of random decisions."""
    corpus: str | None = None
    """Of --run: another text than its own, as text:PATH."""
    processes: int = 1
    """Of forward: measure in so many processes, one after the other, and keep the rows of the one in the middle."""

    def __call__(self) -> None:
        if self.what == "forward":
            self._forward()
            return
        with Progress(LOADING):
            from tokendepth.bench import training
        for row in training.measure(self.device, self.out):
            print(json.dumps(row))

    def _forward(self) -> None:
        with Progress(LOADING):
            from tokendepth.bench import forward, processes
        if not 1 <= self.processes <= 1000:
            raise UserError(f"--processes is {self.processes}; expected a number from 1 to 1000")
        fractions, batches = forward.parse_fractions(self.fractions), forward.parse_batches(self.batches)
        if self.processes > 1:
            words = ["--device", self.device, *(["--batches", self.batches] if self.batches else [])]
            words += ["--corpus", self.corpus] if self.corpus else []
            words += ["--run", str(self.run)] if self.run else ["--fractions", ",".join(map(str, fractions))]
            rows = processes.measure(words, self.processes, self.out)
        elif self.run:
            rows = forward.measure_run(self.run, self.device, self.out, batches, self.corpus)
        else:
            rows = forward.measure(self.device, self.out, fractions, batches)
        for row in rows:
            print(json.dumps(row) if self.json else forward.in_words(row))
