"""The rows of results/ by experiment: numbers over seeds, or None if nothing was run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper import tables
from paper.grid import same
from tokendepth.config import RunConfig, from_dict
from tokendepth.errors import UserError
from tokendepth.report.records import as_number
from tokendepth.report.summary import COLLAPSE, Stat
from tokendepth.runs.results import Row, read_rows, rows_so_far

NOT_RUN = "not run"
RUN_FILES = ("reproduction.json", "shakespeare.json")
"""The first has precedence; the other holds earlier runs of the same experiments."""
PAPER = Path(__file__).with_name("paper.json")
"""The published numbers. They are facts, not results, so they are not in results/."""
BITS = 1.4426950408889634
"""Bits per nat."""


def show(stat: Stat | None, form: str = ".4f", *, ran: bool = False) -> str:
    """Mean, spread and number of seeds. Without a number: `no variation` if it `ran`, else `not run`."""
    if stat is None:
        return "no variation" if ran else NOT_RUN
    if len(set(stat.values)) == 1 and form.startswith(","):  # a count of parameters has no spread
        return format(stat.mean, form)
    return f"{stat.text(form)} (n={len(stat.values)})"


@dataclass(frozen=True)
class Evidence:
    paper: list[Row]
    runs: dict[str, dict[int, Row]]
    """By experiment, then by seed."""
    routing: dict[str, dict[int, Row]]
    initial: dict[str, dict[int, Row]]
    wallclock: list[Row]
    training: list[Row]
    calls: list[Row]
    configs: dict[str, RunConfig]
    quick: bool = False
    """Whether all of it is a miniature, whose numbers mean nothing."""

    @classmethod
    def read(cls, results: Path, *, quick: bool = False) -> "Evidence":
        def rows(name: str) -> list[Row]:
            return rows_so_far(results / name)

        configs = tables.experiments()
        return cls(
            read_rows(PAPER),
            by_experiment([row for name in RUN_FILES for row in rows(name)]),
            by_experiment(rows("routing.json")),
            by_experiment(rows("initialisation.json")),
            _one_device(rows("wallclock.json")),
            _one_device([row for row in rows("training.json") if row["benchmark"] == "training step"]),
            rows("reproduction_calls.json"),
            {label: tables.miniature(config) for label, config in configs.items()} if quick else configs,
            quick,
        )

    # -- the paper's numbers

    def published(self, table: str, row: str) -> Row:
        return next(found for found in self.paper if (found["table"], found["row"]) == (table, row))

    # -- ours

    def rows(self, label: str, of: str = "runs") -> list[Row]:
        """The rows of an experiment, by seed."""
        seeds = getattr(self, of).get(same(self.configs[label], seed=False), {})
        return [seeds[seed] for seed in sorted(seeds)]

    def stat(self, label: str, *keys: str, of: str = "runs") -> Stat | None:
        """A number from each seed's evaluation: `stat(TSA, "hard", "loss")`."""
        first = ("evaluation",) if of == "runs" else ()
        return self._stat(label, lambda row: dig(row, *first, *keys), of)

    def against(self, label: str, base: str, *keys: str) -> Stat | None:
        """The relative difference to another experiment's number, seed by seed."""
        other = {row["config"]["train"]["seed"]: row for row in self.rows(base)}
        pairs = [
            (as_number(dig(row, "evaluation", *keys)), as_number(dig(other[seed], "evaluation", *keys)))
            for row in self.rows(label)
            if (seed := row["config"]["train"]["seed"]) in other
        ]
        ratios = tuple(mine / theirs - 1 for mine, theirs in pairs if mine is not None and theirs)
        return Stat(ratios) if ratios else None

    def at_threshold(self, label: str, threshold: float, *keys: str) -> Stat | None:
        """The same for an early-exit model executed at one of its thresholds."""

        def pick(row: Row) -> Any:
            points = dig(row, "evaluation", "curve") or []
            return next((dig(point, *keys) for point in points if point.get("threshold") == threshold), None)

        return self._stat(label, pick)

    def _stat(self, label: str, pick: Callable[[Row], Any], of: str = "runs") -> Stat | None:
        values = tuple(v for v in (as_number(pick(row)) for row in self.rows(label, of)) if v is not None)
        return Stat(values) if values else None

    def steps_to(self, label: str, nats: float) -> list[int | None]:
        """For each seed with a history, the step of the first validation at or below `nats`; None if there is none."""
        histories = [row["history"] for row in self.rows(label) if row.get("history")]
        return [next((v["step"] for v in history if v["val_loss"] <= nats), None) for history in histories]

    def timed(self, **wanted: Any) -> Row | None:
        """The wall-clock row with these conditions."""
        return next((row for row in self.wallclock if all(row.get(k) == v for k, v in wanted.items())), None)

    def training_row(self, shape_end: str) -> Row | None:
        return next((row for row in self.training if row["shape"].endswith(shape_end)), None)


def dig(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def collapses(evidence: Evidence, label: str) -> bool | None:
    """Whether skipping raises the loss by more than 2%; None if unknown.

    On copy and sort, where losses are close to zero: whether it costs more than one point of accuracy.
    """
    if evidence.configs[label].data.synthetic:
        soft, hard = evidence.stat(label, "soft", "accuracy"), evidence.stat(label, "hard", "accuracy")
        return None if soft is None or hard is None else hard.mean < soft.mean - 0.01
    soft, hard = evidence.stat(label, "soft", "loss"), evidence.stat(label, "hard", "loss")
    return None if soft is None or hard is None else hard.mean > (1 + COLLAPSE) * soft.mean


def by_experiment(rows: list[Row]) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        config = from_dict(row["config"])
        found.setdefault(same(config, seed=False), {}).setdefault(config.train.seed, row)
    return found


def _one_device(rows: list[Row]) -> list[Row]:
    """Times from one device only: a GPU if there are any."""
    on_gpu = [row for row in rows if not row["device"].startswith("CPU")]
    rows = on_gpu or rows
    return [row for row in rows if row["device"] == rows[-1]["device"]]


@contextlib.contextmanager
def needs_report_extra(results: Path) -> Iterator[None]:
    """Around the import of the drawing code, which rows do not need but the page does."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "a package").split(".")[0]
        raise UserError(
            f"the rows are in {results}, but the page needs {missing}, not installed; pip install 'tokendepth[report]'"
        ) from None
