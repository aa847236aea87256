"""Reproduce the TSA paper: train and measure what its tables need and results/ does not have yet.

    from paper.reproduce import reproduce
    reproduce("all", seeds=3, max_minutes=9)        # repeat until it reports that nothing is left

Rows are written at once, so a call that is stopped or out of time keeps what it has. The next call continues, on this
machine or another that has the rows. Timings are taken after the last training run, when nothing else runs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paper import grid, tables
from paper.grid import Deadline, Progress
from paper.tables import Measurement, Table
from tokendepth import progress
from tokendepth.config import ModelConfig, RunConfig
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.runs.run import Run
from tokendepth.training.progress import console

RUNS, ROUTING, INITIALISATION = "reproduction.json", "routing.json", "initialisation.json"
CALLS = "reproduction_calls.json"


def reproduce(
    table: str = "all",
    *,
    seeds: int = 3,
    quick: bool = False,
    max_minutes: float | None = None,
    out: Path = Path("runs/reproduce"),
    results: Path = Path("results"),
    device: str = "auto",
    workers: int | None = None,
    show: bool = True,
) -> Progress:
    """Fill the rows of `table`; "all" is everything but the scaling study. Run folders go to `out`, rows to `results`.

    `quick` runs a miniature of everything, one seed on this CPU in about a minute. It shows how it works and means
    nothing for the paper, so give it its own `results`.
    """
    chosen = tables.chosen(table)
    grid.check_size(seeds, max_minutes)
    seeds, device = (1, "cpu") if quick else (seeds, device)
    study = _Study(chosen, seeds, quick, Deadline.after(max_minutes), out, results, device, show)
    began = time.monotonic()
    try:
        with grid.repeatable(out):
            study.train(workers)
            study.measure_all()
    finally:
        study.write_down(table, (time.monotonic() - began) / 60)
    return study.done


@dataclass
class _Study:
    chosen: list[Table]
    seeds: int
    quick: bool
    deadline: Deadline
    out: Path
    results: Path
    device: str
    show: bool
    done: Progress = field(default_factory=Progress)
    new_runs: int = 0
    new_rows: int = 0

    def say(self, line: str) -> None:
        if self.show:
            console.print(line, markup=False, soft_wrap=True)

    def write_down(self, table: str, minutes: float) -> None:
        """Record the time of this call, for the total on the page."""
        if self.new_runs or self.new_rows:
            from tokendepth.runs.machine import choose_device, environment

            path = self.results / CALLS
            number = len(rows_so_far(path))
            row = {"call": number, "table": table, "seeds": self.seeds, "minutes": minutes}
            row |= {"runs": self.new_runs, "measurements": self.new_rows, **environment(choose_device(self.device))}
            add_rows(path, [row], identity=("call",))

    # -- runs

    def train(self, workers: int | None) -> None:
        taken: set[str] = set()
        for tokens in dict.fromkeys(table.tokens for table in self.chosen):
            configs = {
                name: self._sized(config)
                for table in self.chosen
                if table.tokens == tokens
                for name, config in tables.runs(table, self.seeds).items()
                if name not in taken
            }
            taken |= set(configs)
            todo = grid.missing(configs, self.results / RUNS)
            different = grid.missing(configs)  # as miniatures some coincide
            self.say(f"{len(different)} runs, {len(todo)} without a row in {self.results / RUNS}")
            filled = grid.fill(
                configs,
                self.out,
                self.results / RUNS,
                self.deadline,
                each=[self._count, self._look_at_routing],
                workers=workers,
                tokens=tables.MINIATURE_TOKENS if self.quick else tokens,
                here=self.quick,
                show=self.show,
            )
            self.done.add(filled)

    def _sized(self, config: RunConfig) -> RunConfig:
        return tables.miniature(config) if self.quick else config

    def _count(self, run: Run) -> None:
        self.new_runs += 1

    def _look_at_routing(self, run: Run) -> None:
        """Measure depth by token type while the run's folder exists."""
        if tables.label_of(run.name) not in tables.ROUTING:
            return
        from tokendepth.analysis import routing

        size = {"tokens": tables.MINIATURE_TOKENS} if self.quick else {}
        found = routing.measure(run, device=run.config.train.device, **size)
        whole = grid.identity_row(run)
        passage = (run.evaluation or {})["passage"] if run.config.train.seed == 0 else None
        add_rows(self.results / ROUTING, [{**whole, **found, "passage": passage}], identity=("config",))

    # -- measurements

    def measure_all(self) -> None:
        wanted: list[Measurement] = [measurement for table in self.chosen for measurement in table.measurements]
        for measurement in dict.fromkeys(wanted):
            if not self.deadline.passed():
                self._measure(measurement)
            if self.deadline.passed():  # may have been cut short
                self.done.left.append(measurement)

    def _measure(self, measurement: Measurement) -> None:
        makers: dict[Measurement, Callable[[], Iterator[Row]]] = {
            "fractions": lambda: self._wall_clock("fractions"),
            "batches": lambda: self._wall_clock("batches"),
            "training": self._training_steps,
            "initialisation": self._initialisation,
        }
        before = self.new_rows
        with progress.Progress(f"measuring {measurement}", unit="new rows", show=self.show) as shown:
            for _ in makers[measurement]():
                self.new_rows += 1
                shown.advance()
        self.say(f"{measurement}: {self.new_rows - before} new rows")

    def _wall_clock(self, which: Measurement) -> Iterator[Row]:
        from paper import wallclock

        tiny = ModelConfig(16, 3, 2, 32, 16, 0.0, 50)
        protocol = wallclock.Protocol()
        if self.quick:
            protocol = wallclock.Protocol(tiny, 2, (0.5, 0.726, 0.833), (1, 2), warm_up=1, passes=2)
        listed = wallclock.fraction_sweep if which == "fractions" else wallclock.batch_scaling
        return wallclock.measure(listed(protocol), protocol, self.results, self.device, self.deadline.passed, self.show)

    def _training_steps(self) -> Iterator[Row]:
        from tokendepth.bench import training
        from tokendepth.runs.machine import choose_device, describe_device

        device, path = choose_device(self.device), self.results / "training.json"
        shapes = (
            {"d16 L3 V50, 2x16": (ModelConfig(16, 3, 2, 32, 16, 0.0, 50), 2)} if self.quick else training.PAPER_SHAPES
        )
        known = {
            row["shape"]
            for row in rows_so_far(path)
            if row["benchmark"] == "training step"
            and row["device"] == describe_device(device)
            and "early_exit_ms" in row
        }
        for shape in shapes:
            if shape not in known and not self.deadline.passed():
                yield from training.measure_steps({shape: shapes[shape]}, device, self.results)

    def _initialisation(self) -> Iterator[Row]:
        from paper.initialisation import at_initialisation

        path = self.results / INITIALISATION
        configs = {
            name: self._sized(config)
            for name, config in tables.runs(tables.TABLES["shakespeare"], self.seeds).items()
            if tables.label_of(name) == tables.TSA
        }
        for name, config in grid.missing(configs, path).items():
            row = {"name": name, **at_initialisation(config, device=self.device)}
            add_rows(path, [row], identity=("config",))
            yield row
