"""Between run folders and results/: the figures of a run as one small row, and rows as records to make tables of."""

from pathlib import Path

from tokendepth.config import from_dict, to_dict
from tokendepth.errors import UserError
from tokendepth.report.records import Record
from tokendepth.results import Row, add_rows, read_rows
from tokendepth.runs import Run


def collect(runs: list[Run], path: Path) -> None:
    """Add evaluated runs to a results file; the same config evaluated again takes its old row's place."""
    add_rows(path, [_row(run) for run in runs], identity=("config",))


def _row(run: Run) -> Row:
    evaluation = run.evaluation
    if not evaluation or not run.finished:
        raise UserError(f"{run.path} is not finished and evaluated; run: tokendepth evaluate {run.path}")
    figures = {name: value for name, value in evaluation.items() if name not in ("passage", "env")}
    row = {"config": to_dict(run.config), "evaluation": figures}
    return {"name": run.name, **row, "trained_on": run.env, "evaluated_on": evaluation.get("env")}


def records(path: Path) -> list[Record]:
    """The runs of a results file, without curves and passages."""
    found = []
    for row in read_rows(path):
        config = from_dict(row.get("config"))
        found.append(Record(str(row.get("name")), path, config, [], row["evaluation"], row["trained_on"] or {}, True))
    return found
