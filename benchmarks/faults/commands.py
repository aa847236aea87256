"""The commands that read a run, called as a shell would call them, and every file that each of them reads."""

import contextlib
import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.outcome import Hang, Outcome, limit, package_environment, steady, subject
from benchmarks.faults.stopped import stopped_run
from tokendepth import data
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, RunConfig
from tokendepth.data.store import cache_folder
from tokendepth.recipes import recipe
from tokendepth.runs.files import MANIFEST
from tokendepth.runs.run import SMALL_FILES, Run
from tokendepth.training.loop import train

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str
    seconds: float
    """Of this process, so that a busy machine does not count."""

    @property
    def said(self) -> list[str]:
        """Its messages, without progress lines."""
        return [line.removeprefix("tokendepth: ") for line in self.err.splitlines() if line.startswith("tokendepth: ")]

    @property
    def refusal(self) -> str | None:
        """The one-line error; None if there was none, or a traceback."""
        return self.said[-1] if self.code == 2 and self.said and "Traceback" not in self.err else None


class _OfThisThread(io.StringIO):
    """What this thread writes. Another thread reports the progress of the suite; that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.others = threading.current_thread(), sys.stderr

    def write(self, text: str, /) -> int:
        return super().write(text) if threading.current_thread() is self.thread else self.others.write(text)


def called(*words: object, patience: float = PATIENCE_S) -> Answer:
    """In this process. Hang after `patience` seconds; any other exception would be a traceback."""
    out, err, code = io.StringIO(), _OfThisThread(), 0
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limit(patience):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return Answer(code, out.getvalue(), err.getvalue(), time.process_time() - start)


def typed(*words: object) -> Answer:
    """In its own process."""
    command = [sys.executable, "-m", "tokendepth", *map(str, words)]
    process = subprocess.Popen(
        command, env=package_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Hang(f"{' '.join(command[2:4])} did not end within {PATIENCE_S:g} s") from None
    return Answer(process.returncode, out, err, 0.0)


def train_words(config: RunConfig, out: Path) -> list[str]:
    """The command line that trains or resumes `config`: its recipe and all differences from it."""
    words = ["train", config.recipe, "--out", str(out), "--resume"]
    for part in ("data", "model", "method", "train"):
        own, usual = getattr(config, part), getattr(recipe(config.recipe), part)
        for field in dataclasses.fields(own):
            value = getattr(own, field.name)
            if value != getattr(usual, field.name):
                words += [f"--{part}.{field.name.replace('_', '-')}", str(value)]
    return words


# --- every file of every kind of run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """A file, and a command that reads it."""

    what: str
    """What the file belongs to."""
    path: Path
    words: tuple[str, ...]
    run: Path
    """The run folder, restored for each attempt; `path` may be in it."""
    original: Path
    right: Any
    """The command's result if nothing is damaged."""
    required: bool = True
    """The command must reject any other file instead. If not required, it can work without the file or make it anew."""

    @property
    def name(self) -> str:
        return f"{self.words[0]}, {self.what}: {self.path.name}"

    @property
    def trains(self) -> bool:
        return self.words[0] == "train"

    def outcome(self, answer: Answer) -> Any:
        """In a form that can be compared."""
        if self.trains:
            run = Run(self.run)
            return steady(run), {name: array.tobytes() for name, array in run.weights().items()}
        return _shown(answer, self.words)

    @contextlib.contextmanager
    def fresh(self) -> Iterator[bytes]:
        """Restore the run; yields the content of the file, which is restored at the end, also outside of the run."""
        _replace_folder(self.run, self.original)
        content = self.path.read_bytes()
        try:
            yield content
        finally:
            if not self.path.is_relative_to(self.run):
                remove(self.path)
                self.path.write_bytes(content)

    def check(self, outcome: Outcome, answer: Answer, what: str, *, same: bool = False) -> str | None:
        """Check for the right result or a one-line error, which is returned; with `same`, only the result is right."""
        if refusal := answer.refusal:
            outcome.check(not same, f"{self.name}, {what}: the unchanged file is rejected: {refusal}")
            return refusal
        if answer.code:
            outcome.check(False, f"{self.name}, {what}: exit code {answer.code}: {answer.err[-300:]}")
        else:
            outcome.check(self.outcome(answer) == self.right, f"{self.name}, {what}: another answer")
        return None


def _shown(answer: Answer, words: tuple[str, ...]) -> str:
    """What a user reads: stdout, or the table of a report; not the commit, which may move while this runs."""
    shown = Path(words[-1], "table.md").read_text() if words[0] == "report" else answer.out
    return re.sub(r'"commit": "[^"]*"', "", shown)


def _replace_folder(folder: Path, original: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def readings(folder: Path) -> list[Reading]:
    """For runs that have begun, stopped, or finished with evaluation and thresholds, and for their texts and tokens."""
    tsa = subject(folder, steps=4)
    budget = subject(folder / "text", BudgetConfig(), recipe="demo.budget", steps=2)
    expected = train(tsa, folder / "expected", show=False)
    right = (steady(expected), {name: array.tobytes() for name, array in expected.weights().items()})
    stopped, begun = stopped_run(tsa, folder / "stopped", 3).path, stopped_run(tsa, folder / "begun", 0).path
    finished = train(budget, folder / "finished", show=False).path
    for words in (["calibrate", finished, "--budget", "0.5"], ["evaluate", finished, "--no-timing"]):
        assert called(*words).code == 0
    saved = ("metrics.jsonl", "step-00000003/state.safetensors", f"step-00000003/{MANIFEST}")
    work, page = folder / "work", folder / "page"
    index = _index_of(budget)

    found = []
    for what, original, names in (
        ("stopped", stopped, (*SMALL_FILES, *(f"checkpoints/{name}" for name in saved))),
        ("begun", begun, ("config.json", "env.json")),
    ):
        words = tuple(train_words(tsa, work))
        found += [Reading(what, work / name, words, work, original, right) for name in names]
        found.append(Reading(what, folder / "corpus.txt", words, work, original, right))
    of_report = ("config.json", "env.json", "metrics.jsonl")
    in_all = (*SMALL_FILES, "model.safetensors", MANIFEST)
    evaluate = ("evaluate", str(work), "--split", "test", "--no-timing", "--json")
    commands = [
        (("generate", str(work), "--tokens", "3"), in_all),
        (("generate", str(work), "--tokens", "3", "--budget", "0.5"), ("calibration.json",)),
        (("report", str(work), "--out", str(page)), (*of_report, MANIFEST, "eval.json")),
        (evaluate, (*in_all, budget.data.corpus.removeprefix("text:"), str(index), str(index.with_suffix(".npy")))),
        ((*evaluate, "--budget", "0.5"), ("calibration.json",)),
        (("calibrate", str(work), "--budget", "0.5"), ("calibration.json",)),
    ]
    for words, names in commands:
        _replace_folder(work, finished)
        answer = called(*words)
        assert answer.code == 0, answer.err
        for name in names:
            required = name not in ("calibration.json", str(index), str(index.with_suffix(".npy")))
            shown = _shown(answer, words)
            found.append(Reading("finished", work / name, words, work, finished, shown, required))
    return found


def _index_of(config: RunConfig) -> Path:
    """Of its cached tokens."""
    before = set((cache_folder() / "tokens").glob("*.json"))
    for path in before:
        path.unlink()
    data.load(config.data)
    (index,) = set((cache_folder() / "tokens").glob("*.json"))
    return index
