"""Start processes that train, hear what they report, kill them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.faults.outcome import Outcome, package_environment, subject
from tokendepth.config import RunConfig, to_dict
from tokendepth.runs.run import Run


class Server:
    """Forks a process for each order; see `worker.py`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.faults.worker"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=package_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.orders = 0
        self._order(subject(folder, steps=1), folder / "warm")

    def _order(self, config: RunConfig, out: Path, **rest: Any) -> None:
        assert self.process.stdin
        self.orders += 1
        order = {"number": self.orders, "config": to_dict(config), "out": str(out), **rest}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def start(self, config: RunConfig, out: Path, *, do: str = "train", **rest: Any) -> "Child":
        assert self.process.stdout
        self._order(config, out, do=do, **rest)
        return Child(self.process.stdout, self.orders)

    def finish(self, config: RunConfig, out: Path) -> Run:
        """Train to the end, or go on to it."""
        child = self.start(config, out)
        code = child.exit_code()
        assert code == 0, f"exit code {code}: {child.said}"
        return Run.open(out)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=90)


class Child:
    """A process that trains, and what it has reported so far."""

    def __init__(self, stream: IO[str], number: int) -> None:
        self.stream, self.number = stream, number
        self.said: list[tuple[str, Any]] = []
        self.pid: int = self.wait_for("pid")

    def wait_for(self, what: str, value: object = None) -> Any:
        for line in self.stream:
            number, said, about = json.loads(line)
            if number != self.number:  # of a process that nobody waited for
                continue
            self.said.append((said, about))
            if said == what and value in (None, about):
                return about
            if said == "exit":
                raise EOFError(f"ended without {what} {value}: {self.said}")
        raise EOFError(f"the server has ended: {self.said}")

    def exit_code(self) -> int:
        return self.wait_for("exit")

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have come to its end
            os.kill(self.pid, number)

    def values(self, what: str) -> list:
        return [value for name, value in self.said if name == what]


def check_killed(outcome: Outcome, run: Run, code: int, child: Child) -> None:
    """After a kill: nothing was refused, and every step whose save had returned is still there."""
    outcome.check(not child.values("refused"), f"{run.name}: refused: {child.values('refused')}")
    outcome.check(code == -signal.SIGKILL, f"{run.name}: exit code {code}")
    if not run.finished:
        checkpoint, skipped = run.load_checkpoint()
        found, acknowledged = checkpoint.step if checkpoint else 0, max(child.values("saved"), default=0)
        outcome.check(not skipped, f"{run.name}: {skipped}")
        outcome.check(found >= acknowledged, f"{run.name}: step {acknowledged} was saved, {found} is there")
