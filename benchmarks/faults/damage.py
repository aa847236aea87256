"""Files that rot: missing, cut, emptied or with a flipped bit; every file of every kind of run, by every command."""

import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.commands import Answer, Reading, called, readings, typed
from benchmarks.faults.outcome import Outcome, Tell
from tokendepth.runs.files import MANIFEST


def flipped(content: bytes, dice: random.Random) -> bytes:
    """With one random bit flipped."""
    changed, bit = bytearray(content), dice.randrange(8 * len(content))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


WAYS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "missing": lambda content, dice: None,
    "cut": lambda content, dice: content[: dice.randrange(1, len(content))],
    "emptied": lambda content, dice: b"",
    "a flipped bit": flipped,
    "another flipped bit": flipped,
}
MAY_BE_MISSING = {("report", "eval.json"), ("report", MANIFEST)}
"""Of a run that was not evaluated, or is not finished, as the report then says."""
TYPED_EVERY = 20
"""One in so many attempts runs in its own process."""


def damage(folder: Path, count: int, tell: Tell) -> Outcome:
    """Found and named. A stopped run recovers and ends with identical weights; a finished one is rejected.

    `count` is of files and the commands that read them; each is damaged in every way.
    """
    outcome, dice = Outcome(), random.Random(8)
    every = readings(folder)
    chosen = every if count >= len(every) else dice.sample(every, count)
    went_on = 0
    for reading in chosen:
        for way, damaged in WAYS.items():
            if way == "missing" and (reading.words[0], reading.path.name) in MAY_BE_MISSING:
                continue
            with outcome.attempt(f"{reading.name}, {way}"), reading.fresh() as content:
                changed = damaged(content, dice)
                reading.path.unlink() if changed is None else reading.path.write_bytes(changed)
                call = typed if outcome.attempts % TYPED_EVERY == TYPED_EVERY - 1 else called
                went_on += _check(reading, call(*reading.words), way, outcome)
            tell(outcome.attempts, len(chosen) * len(WAYS))
    outcome.figures |= {"gone on with, or made anew": went_on, "files and commands": len(chosen)}
    return outcome


def _check(reading: Reading, answer: Answer, way: str, outcome: Outcome) -> bool:
    """Returns whether the result was right nevertheless."""
    refusal = reading.check(outcome, answer, way)
    if refusal is not None:
        outcome.said([refusal], reading.original.parent)
    named = [line for line in answer.err.splitlines() if str(reading.path) in line or reading.path.name in line]
    inside = reading.path.is_relative_to(reading.run)
    if reading.what == "stopped" and inside:
        outcome.check(refusal is None, f"{reading.name}, {way}: {refusal}")
        is_copy = reading.path.parent.name == "checkpoints"  # made again without a word
        outcome.check(is_copy or len(named) == 1, f"{reading.name}, {way}: said {answer.err!r}")
    elif reading.what == "finished" and reading.required:
        outcome.check(refusal is not None, f"{reading.name}, {way}: not refused")
        outcome.check(len(named) == 1 or not inside, f"{reading.name}, {way}: said {answer.err!r}")
    return refusal is None
