"""Power cuts: what was not flushed to the disk is gone, in any order.

`kill -9` leaves a process's writes with the kernel, which finishes them; a power cut does not. `Disk` watches the files
below a folder while a training writes them: what each file held when it was last synced (`os.fsync`), and which names
each folder had. At a random moment it makes up what a disk may hold after a cut: of the changes since then all, none or
some, each by the throw of a die, whichever came first. A rename is one change, as in every journaling file system.
"""

import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.outcome import NotTried, Outcome, Tell, subject
from tokendepth.config import RunConfig
from tokendepth.runs.run import EVALUATION_VERSION, Run
from tokendepth.training.loop import train

Names = dict[str, int]
"""The entries of a folder: the inode of each name."""
Change = dict[str, int | None]
"""Names that get another inode, or none, at once."""
WATCHED = ("fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "truncate")
"""Functions of `os`: around each of them the disk is looked at, and the power may be cut."""


class PowerCut(BaseException):
    """Not an Exception, so that nothing handles it."""


class Disk:
    """What is on the disk below `root`, and what would be after a power cut."""

    def __init__(self, root: Path) -> None:
        """All that is there now is on the disk."""
        self.root, self.root_inode = root, root.stat().st_ino
        self.held: dict[int, int] = {}  # open, so that no inode's number is given to another file
        self.now: dict[int, Names] = {}
        self.synced: dict[int, Names | bytes] = {}
        self.changes: dict[int, list[Change]] = {}
        self.moments, self.cut_at, self.dice = 0, 0, random.Random(0)
        self.after: Callable[[Path], None] | None = None
        self.look()
        for inode in self.held:
            self._flush(inode)

    def close(self) -> None:
        for handle in self.held.values():
            os.close(handle)

    def look(self) -> None:
        """Note what has changed since the last look."""
        folders = [(self.root, self.root_inode)]
        for folder, inode in folders:
            if inode not in self.held:
                self.held[inode] = os.open(folder, os.O_RDONLY)
            found: Names = {}
            for entry in os.scandir(folder):
                found[entry.name] = number = entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    folders.append((Path(entry.path), number))
                elif number not in self.held:
                    self.held[number] = os.open(entry.path, os.O_RDONLY)
            self.changes.setdefault(inode, []).extend(_changes(self.now.get(inode, {}), found))
            self.now[inode] = found

    def flushed(self, handle: int) -> None:
        """`handle` was synced."""
        inode = os.fstat(handle).st_ino
        if inode in self.held:
            self._flush(inode)

    def _flush(self, inode: int) -> None:
        self.synced[inode] = dict(self.now[inode]) if inode in self.now else self._content(inode)
        self.changes[inode] = []

    def _content(self, inode: int) -> bytes:
        handle = self.held[inode]
        return os.pread(handle, os.fstat(handle).st_size, 0)

    def holds(self, path: Path) -> bool:
        """Whether a file's content, or a folder's names, would be the same after a power cut."""
        inode = path.stat().st_ino
        found = self.now[inode] if path.is_dir() else path.read_bytes()
        return self.synced.get(inode) == found

    # -- the cut

    @contextlib.contextmanager
    def watched(self, cut_at: int = 0, dice: random.Random | None = None) -> Iterator[None]:
        """While a training writes. `cut_at`: the moment, counted from 1, at which PowerCut is raised; 0 is never."""
        self.moments, self.cut_at, self.dice = 0, cut_at, dice or self.dice
        real = {name: getattr(os, name) for name in WATCHED}
        try:
            for name, function in real.items():
                setattr(os, name, self._watching(name, function))
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def _watching(self, name: str, function: Callable) -> Callable:
        def watching(*arguments: Any, **settings: Any) -> Any:
            self._moment()
            result = function(*arguments, **settings)
            if self.after is None:
                self.look()
                if name == "fsync":
                    self.flushed(arguments[0])
                self._moment()
            return result

        return watching

    def _moment(self) -> None:
        if self.after is None:  # else it is dark already, and what cleans up does so in vain
            self.look()
            self.moments += 1
            if self.moments == self.cut_at:
                self.after = self._left_over()
                raise PowerCut

    def _left_over(self) -> Callable[[Path], None]:
        """What the disk holds after a cut now, as a function that puts it into a folder."""
        chance = self.dice.choice((0.0, 0.2, 0.5, 0.8, 1.0))

        def left_of(inode: int) -> dict[str, Any] | bytes:
            if inode not in self.now:
                return self._left_of_file(inode)
            synced = self.synced.get(inode, {})
            assert isinstance(synced, dict)
            names = dict(synced)
            for change in self.changes[inode]:
                if self.dice.random() < chance:
                    for name, number in change.items():
                        names.pop(name, None)
                        if number is not None:
                            names[name] = number
            return {name: left_of(number) for name, number in names.items()}

        tree = left_of(self.root_inode)
        return lambda folder: _write_tree(tree, folder)

    def _left_of_file(self, inode: int) -> bytes:
        """As it was synced, as it is, or in between: a part of what was added, or its size without its bytes."""
        before, now = self.synced.get(inode, b""), self._content(inode)
        assert isinstance(before, bytes)
        if before == now:
            return now
        kept = _length_of_same_start(before, now)  # that was synced, and nobody has written there since
        part = self.dice.randrange(kept, len(now) + 1)
        return self.dice.choice((before, now, now[:part], now[:kept] + bytes(len(now) - kept)))


def _length_of_same_start(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _changes(before: Names, now: Names) -> list[Change]:
    """A name whose inode another one had before is a rename of that."""
    gone = {inode: name for name, inode in before.items() if now.get(name) != inode}
    changes: list[Change] = []
    for name, inode in now.items():
        if before.get(name) != inode:
            old = gone.pop(inode, None)
            changes.append({**({} if old is None or old in now else {old: None}), name: inode})
    return changes + [{name: None} for name in gone.values() if name not in now]


def _write_tree(tree: dict[str, Any] | bytes, path: Path) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
    else:
        path.mkdir()
        for name, inner in tree.items():
            _write_tree(inner, path / name)


# --- trainings in the dark --------------------------------------------------------------------------------------------

CUTS_OF_A_RUN = 3
EVALUATION = {"version": EVALUATION_VERSION, "hard": {"loss": 1.5, "active_fraction": 0.5}}


def power_cut(folder: Path, count: int, tell: Tell) -> Outcome:
    """Cut at random moments, up to three times a run; each time what was said to be saved is there, and it goes on."""
    outcome, dice, runs = Outcome(), random.Random(7), 0
    configs = [subject(folder, steps=6, eval_every=3, checkpoint_every=every) for every in (1, 2)]
    victims = [(config, *_undisturbed(config, folder / f"expected-{n}")) for n, config in enumerate(configs)]
    while outcome.attempts < count:
        config, expected, moments = victims[runs % len(victims)]
        place, promised = folder / f"run-{runs}-0", {}
        place.mkdir()
        with outcome.guard(place.name):
            for number in range(1, CUTS_OF_A_RUN + 1):
                left, cut_at = folder / f"run-{runs}-{number}", dice.randrange(1, moments + 1)
                with outcome.attempt(left.name):
                    promised |= _work(config, place, left, cut_at, dice)
                    if not left.exists():
                        raise NotTried
                    _check(outcome, _run(left), expected, promised)
                if not left.exists():  # it was done before its time had come
                    break
                place = left
                tell(outcome.attempts, count)
            _work(config, place)
            _check(outcome, _run(place), expected, promised)
            outcome.compare(_run(place), expected)
        runs += 1
        for path in folder.glob("run-*"):
            shutil.rmtree(path)
    outcome.figures |= {"runs compared": runs, "moments of a run": max(moments for _, _, moments in victims)}
    return outcome


def _undisturbed(config: RunConfig, place: Path) -> tuple[Run, int]:
    """The run, and at how many moments it can be cut."""
    place.mkdir()
    disk = Disk(place)
    with contextlib.closing(disk), disk.watched():
        _work(config, place)
    return _run(place), disk.moments


def _run(place: Path) -> Run:
    return Run(place / "runs" / "deep" / "run")


def _work(
    config: RunConfig, place: Path, left: Path | None = None, cut_at: int = 0, dice: random.Random | None = None
) -> dict[str, Any]:
    """Train in `place`, or go on there, and evaluate; returns what had been promised when the power was cut, if it was.

    `left` becomes what the disk held then.
    """
    promised: dict[str, Any] = {}
    cache, os.environ["TOKENDEPTH_CACHE"] = os.environ["TOKENDEPTH_CACHE"], str(place / "cache")
    disk = Disk(place)
    try:
        with contextlib.closing(disk), _promises(promised), contextlib.redirect_stderr(io.StringIO()):
            watched = disk.watched(cut_at, dice) if left else contextlib.nullcontext()
            with contextlib.suppress(PowerCut), watched:
                run = train(config, _run(place).path, resume=True, show=False)
                run.write_evaluation(EVALUATION)
            if left and disk.after:
                disk.after(left)
    finally:
        os.environ["TOKENDEPTH_CACHE"] = cache
    return promised


@contextlib.contextmanager
def _promises(noted: dict[str, Any]) -> Iterator[None]:
    """Note in `noted` which saves have returned: from then on users rely on them."""
    real = {name: getattr(Run, name) for name in ("save_checkpoint", "finish", "write_evaluation")}

    def noting(name: str) -> Callable:
        def call(self: Run, first: Any, *rest: Any) -> None:
            real[name](self, first, *rest)
            noted[name] = first

        return call

    try:
        for name in real:
            setattr(Run, name, noting(name))
        yield
    finally:
        for name, function in real.items():
            setattr(Run, name, function)


def _check(outcome: Outcome, run: Run, expected: Run, promised: dict[str, Any]) -> None:
    """Everything promised is there, and nothing there is damaged."""
    if "write_evaluation" in promised:
        outcome.check(run.path.exists() and run.evaluation is not None, f"{run.path}: the evaluation is lost")
    _ = run.evaluation
    if "finish" in promised:
        outcome.compare(run, expected)
    elif not run.finished:
        checkpoint, skipped = run.load_checkpoint()
        found, saved = checkpoint.step if checkpoint else 0, promised.get("save_checkpoint", 0)
        outcome.check(
            found >= saved and not skipped, f"{run.path}: step {saved} was saved, {found} is there; {skipped}"
        )
