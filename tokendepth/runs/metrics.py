"""metrics.jsonl: one JSON object per line, in order of steps.

It is append-only, so that adding a row takes the same time after a million others. Training appends every row to two
files, the run's own and a copy in the checkpoints folder; a checkpoint records their size and SHA-256. Resuming reads
the rows once and rewrites none; a lost or damaged file is restored from the other.
"""

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

from tokendepth.errors import UserError
from tokendepth.runs.files import (
    Facts,
    append,
    cut,
    disk_faults,
    first_bytes,
    make_folder,
    open_regular,
    put_aside,
    replace_bytes,
    replace_pieces,
)
from tokendepth.runs.shapes import is_number

METRICS = "metrics.jsonl"
LONGEST_ROW = 1 << 16  # bytes; ours have a few hundred

Row = dict[str, Any]


class MetricsLog:
    """The metrics of a run in training."""

    def __init__(self, run: Path, noted: Facts | None = None, rows: bytes | None = None) -> None:
        """`noted` is what `facts` returned at the checkpoint; checkpoints of format 1 contain the `rows` themselves."""
        self.path, self.copy, self.rows = run / METRICS, run / "checkpoints" / METRICS, rows
        self._begin_with(rows or b"")
        if noted is not None:
            self.size, self.sha256 = noted["bytes"], noted["sha256"]

    def _begin_with(self, rows: bytes) -> None:
        self.digest = hashlib.sha256(rows)
        self.size, self.sha256 = len(rows), self.digest.hexdigest()

    def restore(self) -> list[str]:
        """Repair both files before anything is appended; returns a line for the user if rows were damaged."""
        with disk_faults(self.copy):
            make_folder(self.copy.parent)
            if self.rows is not None or not os.path.isfile(self.copy):
                replace_bytes(self.copy, self.rows or b"")
            self.rows = None
        with disk_faults(self.path):
            lines = [] if self._holds_the_rows(self.path) else self._restore_from_the_copy()
            cut(self.path, self.size)
        with disk_faults(self.copy):
            if self.copy.stat().st_size < self.size:
                replace_pieces(self.copy, first_bytes(self.path, self.size))
            cut(self.copy, self.size)
        return lines

    def _holds_the_rows(self, path: Path) -> bool:
        """Whether `path` begins with the checkpoint's rows; rows after those are from steps that will be repeated."""
        digest, size = hashlib.sha256(), 0
        try:
            for piece in first_bytes(path, self.size):
                digest.update(piece)
                size += len(piece)
        except OSError:
            return False
        if (size, digest.hexdigest()) != (self.size, self.sha256):
            return False
        self.digest = digest
        return True

    def _restore_from_the_copy(self) -> list[str]:
        what = "was damaged" if os.path.isfile(self.path) else "was missing or unreadable"
        if self._holds_the_rows(self.copy):
            replace_pieces(self.path, first_bytes(self.copy, self.size))
            return [f"{self.path} {what}; it is restored, nothing is lost"]
        if os.path.lexists(self.path):
            what += f" (and is kept as {put_aside(self.path).name})"
        replace_bytes(self.path, b"")
        replace_bytes(self.copy, b"")
        self._begin_with(b"")
        return [f"{self.path} {what}, and so was its copy: rows up to here are lost, the weights are not"]

    def append(self, row: Row) -> None:
        line = row_bytes(row)
        with disk_faults(self.path):
            append(self.path, line)
            append(self.copy, line)
        self.digest.update(line)
        self.size, self.sha256 = self.size + len(line), self.digest.hexdigest()

    def facts(self) -> Facts:
        """Sync the rows to the disk and return what a checkpoint records. The caller handles OSErrors."""
        append(self.path, b"", sync=True)
        append(self.copy, b"", sync=True)
        return {"bytes": self.size, "sha256": self.sha256}


def row_bytes(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """All complete rows; a last line cut short by a crash is ignored."""
    return _rows(path, 0)


def last_rows(path: Path) -> list[Row]:
    """Some of the last rows, including all of the last step; the rest of the file is not read."""
    try:
        size = os.stat(path).st_size
    except OSError:
        return []
    return _rows(path, max(0, size - LONGEST_ROW))


def _rows(path: Path, start: int) -> list[Row]:
    rows, step = [], 0
    try:
        with open_regular(path) as file:
            file.seek(max(0, start - 1))
            if start:
                file.readline(LONGEST_ROW)  # skip the rest of a row that began earlier
            for number in itertools.count(1):
                line = file.readline(LONGEST_ROW)
                if not line:
                    break
                try:
                    row = _row(line, step)
                except (ValueError, RecursionError) as error:
                    if not line.endswith(b"\n") and not file.read(1):
                        break
                    where = f"line {number}" if not start else "near its end"
                    raise UserError(f"{path} {where} is damaged ({str(error)[:60]}); restore it from a copy") from None
                rows.append(row)
                step = row["step"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; restore it from a copy") from None
    return rows


def _row(line: bytes, step_before: int) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise ValueError("not an object with a step")
    if row["step"] < step_before:
        raise ValueError(f"step {row['step']} comes after step {step_before}")
    for name, value in row.items():
        if not is_number(value):
            raise ValueError(f"{name} is not a number")
    return row
