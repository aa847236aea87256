"""Repeat a benchmark in several processes, one after the other, because speed on a CPU varies between processes."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokendepth.bench.forward import write_row
from tokendepth.errors import UserError
from tokendepth.progress import Progress
from tokendepth.runs.results import Row


def measure(words: list[str], count: int, results: Path) -> Iterator[Row]:
    """Rows of `tokendepth bench forward WORDS` in `count` processes: for each batch size, of the median process."""
    found = []
    with Progress("bench forward", count, unit="processes") as progress:
        for _ in range(count):
            found.append(_measured(words))
            if found[-1][0]["commit"] != found[0][0]["commit"]:
                raise UserError("the code was changed between two processes, so nothing was kept; measure again")
            progress.advance()
    for row in middle(found):
        yield write_row(results, row)


def _measured(words: list[str]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tokendepth", "bench", "forward", *words, "--json", "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(said[-1].removeprefix("tokendepth: "))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def middle(found: list[list[Row]]) -> Iterator[Row]:
    """The rows of the median process for each batch size, with the speedups of all processes, slowest first.

    found: the rows of each process.
    """
    batches = dict.fromkeys((row["shape"], row["batch"]) for row in found[0])
    for batch in batches:
        parts = [[row for row in rows if (row["shape"], row["batch"]) == batch] for rows in found]
        parts.sort(key=lambda rows: statistics.fmean(row["speedup"] for row in rows))
        chosen = parts[(len(parts) - 1) // 2]  # for an even number, the slower of the two
        for row in chosen:
            alike = [one["speedup"] for rows in parts for one in rows if _case(one) == _case(row)]
            yield {**row, "speedup_processes": sorted(alike)}


def _case(row: Row) -> tuple:
    return row["asked"], row["execution"]
