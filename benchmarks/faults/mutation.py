"""Mutated files, read by the commands that read them: the right answer, or a refusal in one line; in bounded memory."""

import random
from pathlib import Path

from benchmarks.faults.commands import Reading, called, readings, typed
from benchmarks.faults.outcome import Outcome, Tell, forget_peak, memory

LONGEST_S = 2.0
MOST_MEMORY = 2**30
TYPED_EVERY = 400
"""One in so many attempts runs in its own process; the others run in this one, which takes a hundredth of the time."""
SLOW = ("train", "evaluate", "calibrate")


SPLICES = (b"", b"\0", b"\xff", b" ", b"\n", b"9" * 40, b"-1", b'"', b"{", b"}", b",", b"null", b"NaN", b"[" * 99)


def mutate(content: bytes, dice: random.Random) -> bytes:
    """One to three edits: bits flipped, bytes replaced, cut, moved, added; or a number made another."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        where = dice.randrange(len(changed) + 1)
        match dice.randrange(7):
            case 0 | 1 if changed:
                changed[min(where, len(changed) - 1)] ^= 1 << dice.randrange(8)
            case 2:
                changed[where : where + dice.randrange(9)] = dice.choice(SPLICES)
            case 3:
                changed[where : where + dice.randrange(1, 200)] = b""
            case 4:
                del changed[where:]
            case 5:
                changed[where:where] = changed[dice.randrange(len(changed) + 1) :][: dice.randrange(1, 64)]
            case _:
                digits = [n for n, byte in enumerate(changed[:20_000]) if 48 <= byte < 58]
                if digits:
                    changed[dice.choice(digits)] = 48 + dice.randrange(10)
    return bytes(changed)


class Examination:
    """One file and command, tried with one content after the other."""

    def __init__(self, reading: Reading, outcome: Outcome) -> None:
        self.reading, self.outcome = reading, outcome
        with reading.fresh() as self.content:
            pass
        self.slowest = 0.0

    def try_out(self, content: bytes) -> None:
        reading, outcome = self.reading, self.outcome
        with outcome.attempt(f"{reading.name}: {content[:60]!r}"), reading.fresh():
            reading.path.write_bytes(content)
            call = typed if outcome.attempts % TYPED_EVERY == TYPED_EVERY - 1 else called
            answer = call(*reading.words)
            refusal = reading.check(outcome, answer, repr(content[:60]), same=content == self.content)
            if refusal:
                outcome.said([refusal], reading.original.parent)
            elif reading.what == "finished" and reading.required:  # every byte counts, also where no answer shows it
                outcome.check(content == self.content, f"{reading.name}: accepted {content[:60]!r}")
            self.slowest = max(self.slowest, answer.seconds)
            outcome.check(answer.seconds <= LONGEST_S, f"{reading.name}: took {answer.seconds:.1f} s")


def mutation(folder: Path, count: int, tell: Tell) -> Outcome:
    """`count` mutated files, spread over all that are read; the commands that take longest get fewer."""
    outcome, dice, slowest = Outcome(), random.Random(4), 0.0
    every = readings(folder)
    weights = [1 if reading.words[0] in SLOW else 8 for reading in every]
    ends = [count * sum(weights[: n + 1]) // sum(weights) for n in range(len(every))]
    before = memory("VmRSS")
    forget_peak()
    for reading, end in zip(every, ends, strict=True):
        examination = Examination(reading, outcome)
        while outcome.attempts < end:
            examination.try_out(mutate(examination.content, dice))
            tell(outcome.attempts, count)
        slowest = max(slowest, examination.slowest)
    grown = memory("VmHWM") - before
    outcome.check(grown <= MOST_MEMORY, f"memory grew by {grown} bytes")
    outcome.figures |= {"slowest, s of CPU": round(slowest, 4), "memory grew by at most, bytes": grown}
    outcome.figures["files and commands"] = len(every)
    return outcome
