"""Start processes that train, hear what they report, kill them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.faults.outcome import Hang, Outcome, package_environment, subject
from tokendepth.config import RunConfig, to_dict
from tokendepth.runs.run import Run

PATIENCE_S = 60.0
"""A process that reports nothing for this long hangs."""


class Server:
    """Forks a process for each order; see `worker.py`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.faults.worker"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=package_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.orders, self.child = 0, None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.hearing = threading.Thread(target=self._hear, args=(self.process.stdout,), daemon=True)
        self.hearing.start()
        self._order(subject(folder, steps=1), folder / "warm")

    def _hear(self, stream: IO[str]) -> None:
        """By a thread, because a pipe that is read by lines cannot be waited for with a limit."""
        with stream:
            for line in stream:
                self.lines.put(line)
        self.lines.put(None)

    def _order(self, config: RunConfig, out: Path, **rest: Any) -> None:
        assert self.process.stdin
        self.orders += 1
        order = {"number": self.orders, "config": to_dict(config), "out": str(out), **rest}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def start(self, config: RunConfig, out: Path, *, do: str = "train", **rest: Any) -> "Child":
        """With `rest` of the order, for what the function `do` of worker.py makes of it."""
        if self.child:
            self.child.kill(signal.SIGKILL)  # one that nobody waited for; they come one after the other
        self._order(config, out, do=do, **rest)
        self.child = Child(self.lines, self.orders)
        return self.child

    def finish(self, config: RunConfig, out: Path, **rest: Any) -> Run:
        """Train, or resume, to the end."""
        child = self.start(config, out, **rest)
        code = child.exit_code()
        assert code == 0, f"exit code {code}: {child.said}"
        return Run.open(out)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin
        if self.child:
            self.child.kill(signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(timeout=90)
        self.hearing.join(timeout=10)


class Child:
    """A process that trains, and what it has reported so far."""

    def __init__(self, lines: "queue.Queue[str | None]", number: int) -> None:
        self.lines, self.number, self.pid = lines, number, 0
        self.said: list[tuple[str, Any]] = []
        self.pid = self.wait_for("pid")

    def wait_for(self, what: str, value: object = None) -> Any:
        """What it says about `what`, where it is `value` if one is named. Hang after PATIENCE_S without a word."""
        while line := self._line():
            number, said, about = json.loads(line)
            if number != self.number:  # of a process that nobody waited for
                continue
            self.said.append((said, about))
            if said == what and value in (None, about):
                return about
            if said == "exit":
                raise EOFError(f"ended without {what} {value}: {self.said}")
        raise EOFError(f"the server has ended: {self.said}")

    def _line(self) -> str | None:
        try:
            return self.lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            self.kill(signal.SIGKILL)
            raise Hang(f"a process was silent for {PATIENCE_S:g} s; before: {self.said[-3:]}") from None

    def exit_code(self) -> int:
        return self.wait_for("exit")

    def kill(self, number: int) -> None:
        ended = not self.pid or (self.said and self.said[-1][0] == "exit")  # its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            if not ended:
                os.kill(self.pid, number)

    def values(self, what: str) -> list:
        return [value for name, value in self.said if name == what]


def check_killed(outcome: Outcome, run: Run, child: Child, saved_before: int = 0) -> int:
    """After a kill: nothing was refused, and every step whose save had returned is still there. Returns the last."""
    outcome.check(not child.values("refused"), f"{run.name}: refused: {child.values('refused')}")
    saved = max(child.values("saved"), default=saved_before)
    if not run.finished:
        checkpoint, skipped = run.load_checkpoint()
        found = checkpoint.step if checkpoint else 0
        outcome.check(not skipped, f"{run.name}: {skipped}")
        outcome.check(found >= saved, f"{run.name}: step {saved} was saved, {found} is there")
    return saved
