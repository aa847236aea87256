"""The user's files next to ours, and links from our names to theirs: none is removed, none is written to."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.commands import called, train_words
from benchmarks.faults.outcome import Outcome, Tell, subject
from benchmarks.faults.stopped import stopped_run
from tokendepth.runs.files import MANIFEST
from tokendepth.runs.run import LOCK, SMALL_FILES, Run

NEWEST, NEXT = "step-00000003", "step-00000004"
COPIES = ("step-00000003.bak", "step-3", "step-000000003", "step-00000003 (1)", "STEP-00000003", ".step-00000003", "it")
NOTES = ("note.txt", ".hidden", ".tmp-note", ".tmp-note-12", "config.json.bak", "model.safetensors~", "metrics.old")
LATER = ("model.safetensors", "eval.json", "report.html")
"""What a command writes after training."""

Case = Callable[[Run, Path], object]
"""Puts the user's files into a run stopped after three steps, or into the folder `mine`."""


def _copies(name: str) -> Case:
    return lambda run, mine: shutil.copytree(run.checkpoints / NEWEST, run.checkpoints / name)


def _note(where: str, name: str) -> Case:
    return lambda run, mine: (run.path / where / name).write_text("mine")


def _next_step(kind: str) -> Case:
    def put(run: Run, mine: Path) -> None:
        path = run.checkpoints / NEXT
        (mine / "note.txt").write_text("mine")
        {
            "file": lambda: path.write_text("mine"),
            "folder": lambda: shutil.copytree(mine, path),
            "link to a folder": lambda: path.symlink_to(mine),
            "link to a file": lambda: path.symlink_to(mine / "note.txt"),
            "link to nothing": lambda: path.symlink_to("nothing"),
            "pipe": lambda: os.mkfifo(path),
        }[kind]()

    return put


def _elsewhere(name: str, link: Callable[[Path, Path], None]) -> Case:
    """A file of ours, present or future, that the user also keeps in another place."""

    def put(run: Run, mine: Path) -> None:
        path, target = run.path / name, mine / Path(name).name
        if path.exists():
            path.rename(target)
        else:
            target.write_text("mine")
        link(path, target)

    return put


def _is_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _is_same_file(path: Path, target: Path) -> None:
    os.link(target, path)


def _lock(link: Callable[[Path, Path], None], content: str) -> Case:
    def put(run: Run, mine: Path) -> None:
        (mine / "theirs").write_text(content)
        link(run.path / LOCK, mine / "theirs")

    return put


def _half_written(name: str) -> Case:
    """Under the temporary name that this process would use to write a file."""

    def put(run: Run, mine: Path) -> None:
        (mine / "theirs").write_text("mine")
        (run.path / f".tmp-{name}-{os.getpid()}").symlink_to(mine / "theirs")

    return put


OURS = (*SMALL_FILES, "checkpoints/metrics.jsonl", f"checkpoints/{NEWEST}/state.safetensors", *LATER[:2])
OUR_NAMES = {Path(name).name for name in OURS}
CASES: dict[str, Case] = {
    **{f"a copy named {name}": _copies(name) for name in COPIES},
    **{
        f"{name} in {where}": _note(where, name)
        for where in (".", "checkpoints", f"checkpoints/{NEWEST}")
        for name in NOTES
    },
    **{
        f"the next checkpoint's name is a {kind}": _next_step(kind)
        for kind in ("file", "folder", "link to a folder", "link to a file", "link to nothing", "pipe")
    },
    **{f"{name} is a link": _elsewhere(name, _is_link) for name in (*OURS, f"checkpoints/{NEWEST}")},
    **{f"{name} has a second name": _elsewhere(name, _is_same_file) for name in OURS},
    **{
        f"{LOCK} is a {kind} {what}": _lock(link, content)
        for kind, link in (("link to", _is_link), ("second name of", _is_same_file))
        for what, content in (("theirs", "mine"), ("an empty file", ""))
    },
    **{f"a half-written {name} is a link": _half_written(name) for name in (*SMALL_FILES, MANIFEST, *LATER[:2])},
}  # fmt: skip


def foreign_files(folder: Path, count: int, tell: Tell) -> Outcome:
    """Resume, evaluate and report the run: all files of the user still exist, unchanged."""
    outcome = Outcome()
    config = subject(folder, steps=4)
    stopped = stopped_run(config, folder / "stopped", 3)
    chosen = list(CASES.items())[:: max(1, len(CASES) // count)]
    for number, (name, put) in enumerate(chosen):
        place = folder / f"case-{number}"
        run, mine = Run(place / "run"), place / "mine"
        with outcome.attempt(name):
            shutil.copytree(stopped.path, run.path)
            mine.mkdir()
            ours = _files(place)
            put(run, mine)
            changed = {path: facts for path, facts in _files(place).items() if ours.get(path) != facts}
            theirs = {path: facts for path, facts in changed.items() if not _is_ours(path)}
            assert theirs
            for words in (
                train_words(config, run.path),
                ["evaluate", run.path, "--no-timing"],
                ["report", run.path, "--out", run.path],
            ):
                answer = called(*words)
                answered = not answer.code or answer.refusal is not None
                outcome.check(answered, f"{name}: {answer.code}, {answer.err[-300:]}")
                outcome.said([answer.refusal] if answer.refusal else [], place)
            left = set(_files(place).values())
            for path, facts in theirs.items():
                outcome.check(facts in left, f"{name}: {path.relative_to(place)} is gone or changed")
        shutil.rmtree(place)
        tell(outcome.attempts, len(chosen))
    return outcome


def _is_ours(path: Path) -> bool:
    """A link at a name that we write to is replaced by our file; its target belongs to the user."""
    return path.is_symlink() and (path.name in OUR_NAMES or path.name.startswith(".tmp-"))


def _files(place: Path) -> dict[Path, tuple[int, bytes]]:
    """Everything there that is not a folder: its inode, and its content or link target."""
    found = {}
    for path in place.rglob("*"):
        if path.is_symlink():
            content = os.fsencode(os.readlink(path))
        elif path.is_dir():
            continue
        else:
            content = path.read_bytes() if path.is_file() else b""
        found[path] = (os.lstat(path).st_ino, content)
    return found
