"""Processes killed with SIGKILL, stopped with SIGTERM and SIGINT, and started twice on one folder."""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.faults.commands import train_words
from benchmarks.faults.outcome import Hang, NotTried, Outcome, Tell, package_environment, subject
from benchmarks.faults.processes import Server, check_killed
from tokendepth.config import METHOD_CONFIGS, RunConfig
from tokendepth.errors import UserError
from tokendepth.runs.run import LOCK, Run
from tokendepth.training.loop import train

PATIENCE_S = 120


@dataclass(frozen=True)
class Victim:
    """A run to be killed: one of every method, each with its own checkpoint interval, threads and precision."""

    config: RunConfig
    threads: int
    """What it begins with; those who resume it come from machines with other numbers."""
    expected: Run
    seconds: float


INTERVALS, PRECISIONS, THREADS = (1, 1, 3, 7), ("float32", "float32", "bfloat16"), (1, 1, 2)
MOST_CALLS = 120
"""Of the disk, before a kill at one of them; a save makes about ten."""


def kill(folder: Path, count: int, tell: Tell) -> Outcome:
    """`kill -9` at random moments and at random calls of the disk; another process resumes, until the run is done."""
    outcome, dice, finished = Outcome(), random.Random(0), 0
    with Server(folder) as server:
        waiting = iter(_victims(server, folder))
        victims: list[Victim] = []
        while outcome.attempts < count:
            victims += itertools.islice(waiting, 1)  # one more before each run, so that few kills need few victims
            victim, run, saved = victims[finished % len(victims)], Run(folder / f"killed-{finished}"), 0
            with outcome.guard(run.name):
                while outcome.attempts < count and not run.finished:
                    with outcome.attempt(run.name):
                        saved = _killed_once(server, victim, run, saved, outcome, dice)
                    tell(outcome.attempts, count)
                server.finish(victim.config, run.path, threads=dice.choice(THREADS))
                outcome.compare(run, victim.expected)
            finished += 1
    outcome.figures |= {"runs compared": finished, "kinds of runs": len(victims)}
    return outcome


def _victims(server: Server, folder: Path) -> Iterator[Victim]:
    for number, method in enumerate(METHOD_CONFIGS.values()):
        every, dtype = INTERVALS[number % len(INTERVALS)], PRECISIONS[number % len(PRECISIONS)]
        threads = THREADS[number % len(THREADS)]
        # Four layers suit every method.
        config = subject(folder, method(), layers=4, steps=14, checkpoint_every=every, dtype=dtype)
        start = time.perf_counter()
        expected = server.finish(config, folder / f"expected-{number}", threads=threads)
        yield Victim(config, threads, expected, time.perf_counter() - start)


def _killed_once(server: Server, victim: Victim, run: Run, saved: int, outcome: Outcome, dice: random.Random) -> int:
    begun = (run.path / "env.json").exists()
    threads = dice.choice(THREADS) if begun else victim.threads
    if by_clock := dice.random() < 0.5:
        child = server.start(victim.config, run.path, threads=threads)
        time.sleep(dice.uniform(0, victim.seconds))
        child.kill(signal.SIGKILL)
    else:
        number = dice.randrange(1, MOST_CALLS)
        child = server.start(victim.config, run.path, threads=threads, kill_at_call=number)
    code = child.exit_code()
    if code == 0:
        raise NotTried
    outcome.check(code == -signal.SIGKILL, f"{run.name}: exit code {code} ({'clock' if by_clock else 'call'})")
    return check_killed(outcome, run, child, saved)


SPARE_RESTARTS = 3
"""For what is not ours: torchrun looks for a free port before its ranks take it, and another process may be quicker."""


def kill_rank(folder: Path, count: int, tell: Tell) -> Outcome:
    """A random one of two ranks under torchrun is killed; torchrun restarts both, and they resume."""
    outcome, dice = Outcome(), random.Random(1)
    config = subject(folder, steps=60, eval_every=20)

    def launch(out: Path, log: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(count + SPARE_RESTARTS), "-m", "tokendepth", *train_words(config, out)]
        with open(log, "wb") as file:
            return subprocess.Popen(command, cwd=folder, env=package_environment(), stdout=file, stderr=file)

    with Server(folder) as server:
        expected = server.finish(config, folder / "expected", do="together", world=2)
    finished = 0
    while outcome.attempts < count:
        run, log = Run(folder / f"killed-{finished}"), folder / f"killed-{finished}.log"
        torchrun = launch(run.path, log)
        acknowledged = kills = 0
        while outcome.attempts + kills < count and (found := _gone_on(torchrun, run, acknowledged)):
            # A finished run's checkpoints go one by one.
            outcome.check(
                found > acknowledged or run.finished, f"{run.name}: step {acknowledged} was saved, {found} is there"
            )
            time.sleep(dice.uniform(0, 0.5))
            acknowledged = _steps(run)
            kills += _kill(torchrun.pid, dice.randrange(2))
            tell(outcome.attempts + kills, count)
        with outcome.guard(run.name):
            code = _ended(torchrun)
            words = log.read_text(errors="replace")
            errors = "; ".join(re.findall(r"^.*Error\b.*$|^tokendepth: .*$", words, re.MULTILINE)[-4:])
            outcome.check(code == 0, f"{run.name}: torchrun ended with code {code}: {errors}")
            outcome.compare(run, expected)
            outcome.said(re.findall(r"^tokendepth: (.*)", words, re.MULTILINE), folder)
        outcome.attempts += max(kills, 1)  # a run that ends before it can be killed is a failure of its own
        finished += 1
    outcome.figures["runs compared"] = finished
    return outcome


def _steps(run: Run) -> int:
    """The newest checkpoint; a folder gets its name once it is whole. 0 before the first and after the end."""
    try:
        names = os.listdir(run.checkpoints)
    except FileNotFoundError:
        return 0
    return max((int(name[5:]) for name in names if name.startswith("step-")), default=0)


def _gone_on(torchrun: subprocess.Popen, run: Run, saved: int) -> int:
    """Wait for a step other than `saved`, so that not most kills hit the imports; 0 when there will be none."""
    deadline = time.monotonic() + PATIENCE_S
    while torchrun.poll() is None and time.monotonic() < deadline:
        if (found := _steps(run)) not in (0, saved):
            return found
        time.sleep(0.02)
    return 0


def _ended(torchrun: subprocess.Popen) -> int:
    try:
        return torchrun.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        torchrun.terminate()  # also ends its ranks
        torchrun.wait()
        raise Hang(f"torchrun did not end within {PATIENCE_S} s") from None


def _kill(torchrun: int, rank: int) -> bool:
    """Kill the rank; False if it has already ended."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        with contextlib.suppress(OSError):
            if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
                os.kill(int(child), signal.SIGKILL)
                return True
    return False


def stop(folder: Path, count: int, tell: Tell) -> Outcome:
    """SIGTERM and SIGINT by turns, half of them at a random moment, half from inside the backward pass."""
    outcome, dice, slowest = Outcome(), random.Random(2), 0.0
    config = subject(folder)
    config = replace(config, train=replace(config.train, checkpoint_every=1000))
    with Server(folder) as server:
        expected = server.finish(config, folder / "expected")
        for number in itertools.count():
            if outcome.attempts >= count:
                break
            run = Run(folder / f"stopped-{number}")
            with outcome.attempt(run.name):
                slowest = max(slowest, _stopped_once(server, config, run, number, outcome, dice))
                outcome.compare(server.finish(config, run.path), expected)
            tell(outcome.attempts, count)
    outcome.figures["slowest exit, s"] = round(slowest, 3)
    return outcome


def _stopped_once(
    server: Server, config: RunConfig, run: Run, attempt: int, outcome: Outcome, dice: random.Random
) -> float:
    """Returns the seconds from the signal to the exit."""
    number, step = (signal.SIGTERM, signal.SIGINT)[attempt % 2], dice.randrange(config.train.steps - 1)
    if attempt % 4 < 2:
        child = server.start(config, run.path)
        child.wait_for("step", step)
        time.sleep(dice.uniform(0, 0.03))
        child.kill(number)
    else:
        child = server.start(config, run.path, action="signal in backward", step=step, signal=number)
        child.wait_for("in backward")
    start = time.perf_counter()
    code = child.exit_code()
    if code == 0 or run.finished:  # there was nothing left to stop
        raise NotTried
    seconds = time.perf_counter() - start
    outcome.check(code == 128 + number, f"{run.name}: exit code {code} after {number.name}")
    outcome.check(len(child.values("saved")) == 1, f"{run.name}: saved {child.values('saved')}")
    after = child.said[child.said.index(("noted", number)) :]
    outcome.check("step" not in dict(after), f"{run.name}: a step was begun after the signal")
    outcome.said(child.values("interrupted"), run.path.parent)
    return seconds


def second(folder: Path, count: int, tell: Tell) -> Outcome:
    """A second process on a folder in use is rejected, naming the first; once that is killed, it may use the folder."""
    outcome = Outcome()
    config = subject(folder, steps=4)
    with Server(folder) as server:
        expected = server.finish(config, folder / "expected")
        for attempt in range(count):
            run = Run(folder / f"held-{attempt}")
            with outcome.attempt(run.name):
                child = server.start(config, run.path, action="sleep", step=2)
                child.wait_for("asleep")
                holder = f"process {child.pid} on "
                if attempt % 2:  # someone removes the lock file; then the holder cannot be named
                    (run.path / LOCK).unlink()
                    holder = "another process"
                before = _names(run.path)
                try:
                    train(config, run.path, resume=True, show=False)
                    outcome.check(False, f"{run.name}: a second process was let in")
                except UserError as error:
                    outcome.check(holder in str(error), f"{run.name}: {error}")
                    who = r"process \d+ on \S+ since [\d: -]+"
                    outcome.said([re.sub(who, "process PID on HOST since TIME", str(error))], folder)
                outcome.check(_names(run.path) == before, f"{run.name}: the second process changed the folder")
                child.kill(signal.SIGKILL)
                child.exit_code()
                outcome.compare(server.finish(config, run.path), expected)
            tell(outcome.attempts, count)
    return outcome


def _names(folder: Path) -> list[tuple[str, int]]:
    return [(str(path), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
