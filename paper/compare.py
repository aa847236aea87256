"""Every method on Tiny-Shakespeare: trains and measures what the tables need and results/ does not have yet.

    from paper.compare import compare
    compare(max_minutes=9)                          # repeat until it reports that nothing is left

First come the runs, then the costs of each setting's first seed, with nothing else running: the time of a forward pass
on the CPU and the FLOPs of a training step. Costs need the trained model, so part of the time of a call is kept for the
run folders that exist. If only a row is left, the model is trained again once there is nothing else to train.
"""

from dataclasses import dataclass, field
from pathlib import Path

from paper import grid, settings, tables
from paper.grid import Deadline, Progress
from paper.outcomes import COSTS, Outcomes
from paper.settings import RUNS, SHAKESPEARE, Comparison, Setting
from tokendepth import progress
from tokendepth.config import RunConfig, from_dict
from tokendepth.runs.results import add_rows
from tokendepth.runs.run import Run
from tokendepth.training.progress import console

TRAINING = 0.8
"""Share of the time of a call after which no more runs are trained."""


def compare(
    *,
    seeds: int = SHAKESPEARE.seeds,
    quick: bool = False,
    max_minutes: float | None = None,
    out: Path = Path("runs/compare"),
    results: Path = Path("results"),
    workers: int | None = None,
    show: bool = True,
) -> Progress:
    """Fill the rows of the comparison; run folders go to `out`, rows to `results`.

    `quick` runs a miniature of everything, one seed on this CPU. It shows how the command works and says nothing about
    any method, so give it its own `results`.
    """
    grid.check_size(seeds, max_minutes)
    training, deadline = (Deadline.after(max_minutes and share * max_minutes) for share in (TRAINING, 1.0))
    study = _Study(SHAKESPEARE, 1 if quick else seeds, quick, training, deadline, out, results, workers, show)
    with grid.repeatable(out):
        study.train()
        study.measure()
    return study.progress


@dataclass
class _Study:
    comparison: Comparison
    seeds: int
    quick: bool
    training: Deadline
    deadline: Deadline
    out: Path
    results: Path
    workers: int | None
    show: bool
    progress: Progress = field(default_factory=Progress)

    def say(self, line: str) -> None:
        if self.show:
            console.print(line, markup=False, soft_wrap=True)

    def fill(self, configs: dict[str, RunConfig], rows: Path) -> None:
        tokens = tables.MINIATURE_TOKENS if self.quick else None
        how = {"workers": self.workers, "tokens": tokens, "here": self.quick, "show": self.show}
        self.progress.add(grid.fill(configs, self.out, rows, self.training, **how))

    # -- runs

    def train(self) -> None:
        configs = {
            name: config
            for setting in self.comparison.settings
            for name, config in settings.runs(setting, self.comparison.corpus, self.seeds, quick=self.quick).items()
        }
        todo = grid.missing(configs, *(self.results / name for name in self.comparison.files))
        self.say(f"{len(configs)} runs, {len(todo)} without a row in {self.results}")
        self.fill(todo, self.results / RUNS)

    # -- costs

    def measure(self) -> None:
        outcomes = Outcomes.read(self.results, self.comparison, quick=self.quick)
        todo = [s for s in self.comparison.settings if outcomes.first_row(s) and outcomes.cost(s) is None]
        self.say(f"{len(todo)} settings whose costs are not measured")
        left = self._measure(outcomes, todo)
        if left and not self.progress.left and not self.training.passed():
            # Their rows go where the folders go, so that they are lost together.
            self.fill({name: config for one in left for name, config in self._first(one).items()}, self.out / RUNS)
            left = self._measure(outcomes, left)
        self.progress.left += [f"costs of {setting.title}" for setting in left]

    def _measure(self, outcomes: Outcomes, todo: list[Setting]) -> list[Setting]:
        """Measure those whose trained models exist, or that need none; return the others."""
        from paper import costs

        at_hand = [one for one in todo if one.method == "dense" or self._run(one).finished]
        left = [one for one in todo if one not in at_hand]
        dense = outcomes.configs[self.comparison.settings[0]]  # six plain layers: all times are relative to them
        with progress.Progress("measuring costs", len(at_hand), unit="settings", show=self.show) as shown:
            for setting in at_hand:
                if self.deadline.passed():
                    left.append(setting)
                    continue
                shown.update(note=setting.title)
                row = outcomes.first_row(setting)
                assert row is not None
                run = None if setting.method == "dense" else self._run(setting)
                at, repeats = setting.point(row), 3 if self.quick else 15
                found = costs.measure(from_dict(row["config"]), run, at, dense, repeats=repeats)
                add_rows(self.results / COSTS, [{"name": row["name"], "at": at, **found}], identity=("config", "at"))
                self.say(f"{setting.title}: {found['time']['speedup']:.2f} of the dense speed")
                shown.advance()
        return left

    def _run(self, setting: Setting) -> Run:
        (name,) = self._first(setting)
        return Run(self.out / name)

    def _first(self, setting: Setting) -> dict[str, RunConfig]:
        """The run of the first seed, by its name."""
        return settings.runs(setting, self.comparison.corpus, 1, quick=self.quick)
