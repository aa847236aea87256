"""Commands about many runs, or about this machine."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from tokendepth.errors import UserError

if TYPE_CHECKING:
    from tokendepth.studies.grid import Progress


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
        from tokendepth.train.sweep import sweep

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
class Reproduce:
    """Train, evaluate, time and report the paper, or one table of it. What has its row in results/ is not repeated."""

    table: tyro.conf.Positional[str]
    """all, or one: synthetic, shakespeare, enwik8, penalty, early-exit, wall-clock, batch, training; or scaling."""
    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/reproduce")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        from tokendepth.studies.document import write
        from tokendepth.studies.reproduce import reproduce

        results = self.results or (self.out / "results" if self.quick else Path("results"))
        settings: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings["results"] = results
        done = reproduce(**settings)
        print(write(results, results.parent / "docs" / "REPRODUCTION.md", quick=self.quick))
        _tell(done)


@dataclass(frozen=True)
class Compared:
    """Of compare: the text on which the methods are compared."""

    corpus: str = "shakespeare"
    """shakespeare: two budgets, three seeds. enwik8: one budget, one seed."""


@dataclass(frozen=True)
class Compare:
    """Every method at the same budgets beside dense models and random routing: two tables, one figure.

    What has its row in results/ is not repeated.
    """

    data: Compared = Compared()
    seeds: int | None = None
    """How many seeds each, from 0; by default as many as the comparison on this corpus has."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/compare")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        from tokendepth.studies.compare import compare
        from tokendepth.studies.comparison import write

        results = self.results or (self.out / "results" if self.quick else Path("results"))
        settings: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings |= {"corpus": settings.pop("data").corpus, "results": results}
        done = compare(**settings)
        print(write(results, results.parent / "docs" / "COMPARISON.md", quick=self.quick))
        _tell(done)


def _tell(done: "Progress") -> None:
    """What a study could not do."""
    for name, words in done.failed.items():
        print(f"tokendepth: {name} failed: {words}", file=sys.stderr)
    if done.left:
        print(f"out of time: {len(done.left)} left, {done.left[0]} first; repeat the same line to go on")
    if done.failed:
        sys.exit(1)


@dataclass(frozen=True)
class Bench:
    """Measure this machine and add the rows to results/."""

    what: tyro.conf.Positional[Literal["forward", "training", "faults"]]
    """forward: what skipping gives on the clock. training: steps of TSA and of skipping against dense ones.
    faults: what killed, full and damaged runs lose."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""
    results: Path = Path("results")
    """Folder of the results files."""
    json: bool = False
    """Print one JSON object a line instead of words."""
    fractions: str | None = None
    """Of forward: active fractions of random decisions, with commas between them."""
    batches: str | None = None
    """Of forward: sequences in a pass, with commas between them."""
    run: Path | None = None
    """Of forward: a trained run that decides for itself on its validation text, instead of random decisions."""
    processes: int = 1
    """Of forward: measure in so many processes, one after the other, and keep the rows of the one in the middle."""
    only: str | None = None
    """Of faults: the names of some, with commas between them."""
    scale: float = 1.0
    """Of faults: the part of the full number of attempts, from 0 to 1."""

    def __call__(self) -> None:
        if self.what == "forward":
            self._forward()
        elif self.what == "training":
            from tokendepth.bench import training

            for row in training.measure(self.device, self.results):
                print(json.dumps(row))
        else:
            self._faults()

    def _forward(self) -> None:
        from tokendepth.bench import forward, processes

        if self.processes < 1:
            raise UserError(f"--processes is {self.processes}; expected 1 or more")
        fractions, batches = forward.parse_fractions(self.fractions), forward.parse_batches(self.batches)
        if self.processes > 1:
            words = ["--device", self.device, *(["--batches", self.batches] if self.batches else [])]
            words += ["--run", str(self.run)] if self.run else ["--fractions", ",".join(map(str, fractions))]
            rows = processes.measure(words, self.processes, self.results)
        elif self.run:
            rows = forward.measure_run(self.run, self.device, self.results, batches)
        else:
            rows = forward.measure(self.device, self.results, fractions, batches)
        for row in rows:
            print(json.dumps(row) if self.json else forward.in_words(row))

    def _faults(self) -> None:
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        from tokendepth.bench.faults.registry import measure
        from tokendepth.train.progress import console

        failed = 0
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as bar:
            tasks = {}

            def tell(name: str, done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = bar.add_task(name)
                bar.update(tasks[name], completed=done, total=total)

            for row in measure(self.device, self.results, self.only, self.scale, tell):
                counts = f"{row['attempts']} tried, {row['failed']} failed" if not row["skipped"] else row["skipped"]
                print(f"{row['fault']:<11} {counts}")
                for line in row["failures"]:
                    print(f"            {line}")
                failed += row["failed"]
        if failed:
            sys.exit(1)
