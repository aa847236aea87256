"""What can be there instead of a file: a pipe, a device, an endless file, a folder, a link."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.commands import Reading, called, readings, remove, train_words, typed
from benchmarks.faults.outcome import Outcome, Tell, forget_peak, memory, subject
from benchmarks.faults.stopped import stopped_run
from tokendepth.runs.run import LOCK

LONGEST_S = 5.0
PATIENCE_S = 30.0
"""On the clock, for what waits and takes no time of its own."""
MOST_MEMORY = 2**28
TYPED_EVERY = 25
"""One in so many attempts runs in its own process."""


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**12)


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "note.txt").write_text("mine")


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": device,
    "a terabyte": endless,
    "folder": lambda path: path.mkdir(),
    "folder with something in it": full_folder,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


def special_files(folder: Path, count: int, tell: Tell) -> Outcome:
    """Something else instead of each file, for each command that reads it: the right result or a one-line error."""
    outcome, dice, slowest = Outcome(), random.Random(9), 0.0
    cases = [(reading, kind) for reading in readings(folder) for kind in SPECIAL]
    dice.shuffle(cases)
    before = memory("VmRSS")
    forget_peak()
    for reading, kind in cases[:count]:
        with outcome.attempt(f"{reading.name}, {kind}"), reading.fresh():
            remove(reading.path)
            SPECIAL[kind](reading.path)
            slowest = max(slowest, _tried(reading, kind, outcome))
        tell(outcome.attempts, min(count, len(cases)))
    for kind in list(SPECIAL)[:count]:
        with outcome.attempt(f"train, {LOCK}, {kind}"):
            _lock(folder / f"lock-{kind}", kind, outcome)
        with outcome.attempt(f"{kind} in the place of a run"):
            _whole_run(folder / f"run-{kind}", kind, outcome)
    grown = memory("VmHWM") - before
    outcome.check(grown <= MOST_MEMORY, f"memory grew by {grown} bytes")
    outcome.figures |= {"slowest, s of CPU": round(slowest, 4), "memory grew by at most, bytes": grown}
    return outcome


def _tried(reading: Reading, kind: str, outcome: Outcome) -> float:
    by_itself = outcome.attempts % TYPED_EVERY == TYPED_EVERY - 1
    answer = typed(*reading.words) if by_itself else called(*reading.words, patience=PATIENCE_S)
    if refusal := reading.check(outcome, answer, kind):
        outcome.said([refusal], reading.original.parent)
    outcome.check(answer.seconds <= LONGEST_S, f"{reading.name}, {kind}: took {answer.seconds:.1f} s")
    return answer.seconds


def _lock(folder: Path, kind: str, outcome: Outcome) -> None:
    """In the place of a lock it is somebody else's, and left alone."""
    config = subject(folder, steps=4)
    run = stopped_run(config, folder / "run", 2)
    SPECIAL[kind](run.path / LOCK)
    before = os.lstat(run.path / LOCK)
    answer = called(*train_words(config, run.path), patience=PATIENCE_S)
    outcome.check(bool(answer.refusal), f"{LOCK}, {kind}: {answer.code}, {answer.err[-300:]}")
    outcome.check(os.path.samestat(before, os.lstat(run.path / LOCK)), f"{LOCK}, {kind}: is gone")
    outcome.said([answer.refusal or ""], folder)
    shutil.rmtree(folder)


def _whole_run(folder: Path, kind: str, outcome: Outcome) -> None:
    config, place = subject(folder, steps=1), folder / "run"
    SPECIAL[kind](place)
    for words in (["evaluate", place], ["generate", place], ["report", place], train_words(config, place)):
        answer = called(*words, patience=PATIENCE_S)
        new = (words[0], kind) == ("train", "folder")  # an empty one is where a run may begin
        outcome.check(new or bool(answer.refusal), f"{words[0]} {kind}: {answer.code}, {answer.err[-300:]}")
        outcome.said([answer.refusal] if answer.refusal else [], folder)
