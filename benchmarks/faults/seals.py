"""Bits flipped in the files that numbers are read from and that were added after a run was finished."""

import random
from pathlib import Path

from benchmarks.faults.commands import called, readings
from benchmarks.faults.damage import flipped
from benchmarks.faults.outcome import Outcome, Tell

SEALED = {("eval.json", "report"): "numbers of a report", ("calibration.json", "generate"): "thresholds of a model"}
"""A file and a command that reads it."""


def seals(folder: Path, count: int, tell: Tell) -> Outcome:
    """`count` flips in each: refused in one line that names the file, never read as another number."""
    outcome, dice = Outcome(), random.Random(10)
    chosen = [reading for reading in readings(folder) if (reading.path.name, reading.words[0]) in SEALED]
    assert len(chosen) == len(SEALED)
    for reading in chosen:
        with reading.fresh() as content:
            for _ in range(count):
                with outcome.attempt(reading.name):
                    reading.path.write_bytes(flipped(content, dice))
                    answer = called(*reading.words)
                    refusal = answer.refusal or ""
                    outcome.check(str(reading.path) in refusal, f"{reading.name}: {answer.code}, {answer.err[-300:]!r}")
                    outcome.said([refusal], reading.original.parent)
                tell(outcome.attempts, count * len(chosen))
    return outcome
