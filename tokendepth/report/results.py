"""Results files: a run's numbers as one small row, and rows as records for tables."""

import re
from dataclasses import replace
from pathlib import Path

from tokendepth.config import from_dict, to_dict
from tokendepth.errors import UserError
from tokendepth.report.records import Record
from tokendepth.runs import shapes
from tokendepth.runs.results import Row, add_rows, read_rows
from tokendepth.runs.run import Run

SHOWN_BUDGETS = (0.25, 0.4, 0.5, 0.7, 1.0)


def collect(runs: list[Run], path: Path) -> None:
    """Add evaluated runs to a results file; an earlier row with the same config is replaced."""
    add_rows(path, [row(run) for run in runs], identity=("config",))


def row(run: Run) -> Row:
    """The row of a run in a results file."""
    evaluation = run.evaluation
    if not evaluation or not run.finished:
        raise UserError(f"{run.path} is not finished and evaluated; run: tokendepth evaluate {run.path}")
    figures = {name: value for name, value in evaluation.items() if name not in ("passage", "env")}
    facts = {"config": to_dict(run.config), "evaluation": figures}
    return {"name": run.name, **facts, "trained_on": run.env, "evaluated_on": evaluation.get("env")}


def records(path: Path) -> list[Record]:
    """The runs of a results file, without curves and passages."""
    return [record(row, path) for row in read_rows(path)]


def record(row: Row, path: Path) -> Record:
    """A row of the results file at `path` as a record; its metrics are the validations, if the row has them."""
    if problem := shapes.problem(row, shapes.ROW):
        raise UserError(f"{path} is damaged: in the row {row.get('name')!r:.60} {problem}; restore it from a copy")
    config, history = from_dict(row["config"]), row.get("history", [])
    return Record(row["name"], path, config, history, row["evaluation"], row["trained_on"] or {}, True)


def at_budgets(found: list[Record]) -> list[Record]:
    """Repeat a run that was evaluated at several budgets, once for each budget that tables show."""
    shown = []
    for record in found:
        points = [point for point in record.field("curve") or [] if point.get("budget") in SHOWN_BUDGETS]
        shown += [_at_budget(record, point) for point in points] or [record]
    return shown


def _at_budget(record: Record, point: Row) -> Record:
    """The record at one budget of its curve, as if that were the run's own budget."""
    budget = point["budget"]
    method = record.config.method
    if "budget" in vars(method):
        method = replace(method, budget=budget)
    config = replace(record.config, method=method)
    figures = {name: value for name, value in point.items() if name != "budget"}
    evaluation = {**record.evaluation, **figures, "hard": point["sparse"], "soft": None, "time": None, "curve": []}
    name = re.sub(r"(-seed\d+)?$", rf" at {budget:g}\1", record.name, count=1)
    return replace(record, name=name, config=config, evaluation=evaluation)
