"""Results files: small, committed lists of rows, each with everything needed to check and reproduce it."""

import json
from pathlib import Path
from typing import Any

from tokendepth.config import from_dict, to_dict
from tokendepth.errors import UserError
from tokendepth.runs.files import disk_faults, make_folder, read_json, write_bytes

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    rows = read_json(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is not a results file: expected a JSON list of objects; restore it from a copy")
    return rows


def rows_so_far(path: Path) -> list[Row]:
    """The rows of the file at `path`; none if it does not exist yet."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a results file; name one: {path / 'results.json'}")
    return read_rows(path) if path.exists() else []


def check_can_add(path: Path) -> None:
    """Raise UserError if rows cannot be added to the file at `path`, before hours of work; makes its folder."""
    with disk_faults(path):
        make_folder(path.parent)
    rows_so_far(path)


def add_rows(path: Path, rows: list[Row], identity: tuple[str, ...]) -> None:
    """Add `rows` to the file at `path`; a row with the same values of all `identity` keys is replaced."""

    def key(row: Row) -> str:
        return json.dumps([_as_of_now(row, name) for name in identity], sort_keys=True)

    with disk_faults(path):
        make_folder(path.parent)
    merged = {key(row): row for row in [*rows_so_far(path), *rows]}
    # One row per line, so that a changed number is a one-line diff.
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in merged.values()) + "\n]\n"
    write_bytes(path, text.encode())


def _as_of_now(row: Row, name: str) -> Any:
    """A value that identifies rows; configs of earlier versions are converted, as they are the same experiment."""
    value = row.get(name)
    if name != "config":
        return value
    try:
        return to_dict(from_dict(value))
    except UserError:
        return value
