"""The outcome of one kind of fault, injected many times; and the small run that it is injected into."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokendepth.config import DataConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.runs.run import Run

Tell = Callable[[int, int], None]
"""Called with the number done and the total."""

LIMIT_S = 120.0
"""An attempt that takes longer hangs, however busy the machine is; a normal one takes tenths of a second."""


class Hang(BaseException):
    """Something did not end within its limit. Not an Exception, which the code that hangs could catch."""


class NotTried(Exception):
    """There was nothing left to disturb: the process ended first."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Hang in this process, by SIGALRM, if the block takes longer."""

    def late(number: int, frame: object) -> None:
        raise Hang(f"did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left)  # of the enclosing limit


@dataclass
class Outcome:
    attempts: int = 0
    failures: list[str] = field(default_factory=list)
    hangs: int = 0
    """How many of the failures are processes, or commands in this one, that hit their time limit."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further counts and measurements."""
    says: list[str] = field(default_factory=list)
    """Messages shown to the user, each different line once."""
    skipped: str = ""
    """Why nothing was tried on this machine."""

    def check(self, ok: bool, failure: object) -> None:
        if not ok:
            self.failures.append(str(failure))

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """One more attempt, with a time limit. One that finds nothing to disturb raises NotTried and does not count."""
        with contextlib.suppress(NotTried):
            with self.guard(name), limit(LIMIT_S):
                yield
            self.attempts += 1

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Anything that ends the block early, a limit or an unexpected error, is a failure."""
        try:
            yield
        except NotTried:
            raise
        except Hang as hang:
            self.hangs += 1
            self.failures.append(f"{name}: {hang}")
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def compare(self, run: Run, expected: Run, *, metrics: bool = True) -> None:
        """A run that was disturbed and resumed must end like the undisturbed one."""
        try:
            difference = max_difference(run, expected)
            self.check(difference == 0.0, f"{run.name}: weights differ by {difference}")
            self.check(not metrics or steady(run) == steady(expected), f"{run.name}: metrics differ")
        except UserError as error:
            self.failures.append(str(error))

    def said(self, lines: list[str], folder: Path) -> None:
        """Keep messages, without this measurement's folders; lines that differ only in numbers count as one."""
        known = {re.sub(r"\d+", "0", line) for line in self.says}
        for line in lines:
            plain = line.replace(str(folder), "RUNS")
            if (kind := re.sub(r"\d+", "0", plain)) not in known:
                known.add(kind)
                self.says.append(plain)


def subject(
    folder: Path, method: MethodConfig | None = None, *, recipe: str = "demo.tsa", layers: int = 3, **train: Any
) -> RunConfig:
    """A run that trains in a fraction of a second: TSA, dropout on, a checkpoint at every step."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        lines = (f"{n} green bottles on the wall, {n * n} of them \u2013 and one falls\n" for n in range(60, 0, -1))
        folder.mkdir(parents=True, exist_ok=True)
        corpus.write_text("".join(lines), encoding="utf-8")
    settings = {"steps": 20, "batch_size": 4, "lr": 1e-2, "eval_every": 5, "checkpoint_every": 1, "log_every": 1}
    return RunConfig(
        data=DataConfig(f"text:{corpus}"),
        model=ModelConfig(d_model=32, n_layer=layers, n_head=4, d_ff=64, context=16, dropout=0.1),
        method=method or TSAConfig(depth_penalty=0.1),
        train=TrainConfig(**{**settings, "device": "cpu", "dtype": "float32", **train}),
        recipe=recipe,
    )


def max_difference(run: Run, expected: Run) -> float:
    """Over all weights; infinite if the two do not have the same ones, 0.0 only if they are identical bit for bit."""
    one, other = run.weights(), expected.weights()
    if {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}:
        return 0.0
    if {n: a.shape for n, a in one.items()} != {n: a.shape for n, a in other.items()}:
        return float("inf")
    largest = max(float(np.abs(one[n].astype(np.float64) - other[n]).max()) for n in one)
    return largest if largest > 0 else float("inf")  # equal values with different bits, or NaN


def steady(run: Run) -> list[dict[str, Any]]:
    """Metrics without the only one that depends on the clock."""
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in run.metrics()]


def package_environment() -> dict[str, str]:
    """For a process that imports this copy of the package, with one thread: sums depend on the number of threads."""
    root = str(Path(__file__).resolve().parents[2])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}  # if there are more, they wait without occupying a core
    return {
        **os.environ,
        **threads,
        **passive,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def forget_peak() -> None:
    """Reset this process's peak memory: earlier use does not count."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """Memory of this process in bytes, from Linux: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
