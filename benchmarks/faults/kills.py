"""Processes killed with SIGKILL, stopped with SIGTERM and SIGINT, and started twice on one folder."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.outcome import Outcome, Tell, package_environment, subject
from benchmarks.faults.processes import Server, check_killed
from tokendepth.errors import UserError
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

PATIENCE_S = 120


def kill(folder: Path, count: int, tell: Tell) -> Outcome:
    """`kill -9` at random moments of a run that saves at every step; another process resumes, until it is done."""
    outcome, dice = Outcome(), random.Random(0)
    config = subject(folder)
    with Server(folder) as server:
        server.finish(config, folder / "expected")
        start = time.perf_counter()
        expected = server.finish(config, folder / "timed")
        whole = time.perf_counter() - start
        outcome.compare(expected, Run(folder / "expected"))
        finished, run = 0, Run(folder / "killed-0")
        while outcome.attempts < count:
            child = server.start(config, run.path)
            time.sleep(dice.uniform(0, whole))
            child.kill(signal.SIGKILL)
            code = child.exit_code()
            if code != 0:
                outcome.attempts += 1
                tell(outcome.attempts, count)
                check_killed(outcome, run, code, child)
            if code == 0 or outcome.attempts == count:
                if code != 0:
                    server.finish(config, run.path)
                outcome.compare(run, expected)
                finished += 1
                run = Run(folder / f"killed-{finished}")
    outcome.figures["runs compared"] = finished
    return outcome


SPARE_RESTARTS = 3
"""For what is not ours: torchrun looks for a free port before its ranks take it, and another process may be quicker."""


def kill_rank(folder: Path, count: int, tell: Tell) -> Outcome:
    """A random one of two ranks under torchrun is killed; torchrun starts both again, and they resume."""
    outcome, dice = Outcome(), random.Random(1)
    corpus = subject(folder).data.corpus
    line = f"--data.corpus {corpus} --model.d-model 32 --model.n-layer 3 --model.n-head 4 --model.d-ff 64 "
    line += "--model.context 16 --model.dropout 0.1 --train.steps 60 --train.batch-size 4 --train.eval-every 20 "
    line += "--train.checkpoint-every 1 --train.device cpu --train.lr 0.01 --train.log-every 1 --resume"

    def launch(out: Path, log: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", str(count + SPARE_RESTARTS), "-m", "tokendepth", "train", "demo.tsa"]
        with open(log, "wb") as file:
            return subprocess.Popen(
                [*command, *line.split(), "--out", str(out)],
                cwd=folder,
                env=package_environment(),
                stdout=file,
                stderr=file,
            )

    expected = Run(folder / "expected")
    code = _ended(launch(expected.path, folder / "expected.log"))
    outcome.check(code == 0, f"the undisturbed run ended with code {code}")
    finished = 0
    while outcome.attempts < count:
        run, log = Run(folder / f"killed-{finished}"), folder / f"killed-{finished}.log"
        torchrun = launch(run.path, log)
        acknowledged = 0
        while outcome.attempts < count and (found := _gone_on(torchrun, run, acknowledged)):
            outcome.check(found > acknowledged, f"{run.name}: step {acknowledged} was saved, {found} is there")
            time.sleep(dice.uniform(0, 0.5))
            acknowledged = _steps(run)
            if _kill(torchrun.pid, dice.randrange(2)):
                outcome.attempts += 1
                tell(outcome.attempts, count)
        code = _ended(torchrun)
        words = log.read_text(errors="replace")
        errors = "; ".join(re.findall(r"^.*Error\b.*$|^tokendepth: .*$", words, re.MULTILINE)[-4:])
        outcome.check(code == 0, f"{run.name}: torchrun ended with code {code}: {errors}")
        outcome.compare(run, expected)
        outcome.said(re.findall(r"^tokendepth: (.*)", words, re.MULTILINE), folder)
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
        torchrun.terminate()  # it ends its ranks
        return torchrun.wait()


def _kill(torchrun: int, rank: int) -> bool:
    """Kill the rank; False where it has come to its end."""
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
        while outcome.attempts < count:
            attempt = outcome.attempts
            number = (signal.SIGTERM, signal.SIGINT)[attempt % 2]
            run, step = Run(folder / f"stopped-{attempt}"), dice.randrange(config.train.steps - 1)
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
                outcome.compare(run, expected)
                shutil.rmtree(run.path)
                continue
            slowest = max(slowest, time.perf_counter() - start)
            outcome.attempts += 1
            tell(outcome.attempts, count)
            outcome.check(code == 128 + number, f"{run.name}: exit code {code} after {number.name}")
            outcome.check(len(child.values("saved")) == 1, f"{run.name}: saved {child.values('saved')}")
            after = child.said[child.said.index(("noted", number)) :]
            outcome.check("step" not in dict(after), f"{run.name}: a step was begun after the signal")
            outcome.said(child.values("interrupted"), folder)
            outcome.compare(server.finish(config, run.path), expected)
    outcome.figures["slowest exit, s"] = round(slowest, 3)
    return outcome


def second(folder: Path, count: int, tell: Tell) -> Outcome:
    """A second process on the folder of one at work is refused and told whose it is; when that is killed, it may."""
    outcome = Outcome()
    config = subject(folder, steps=4)
    with Server(folder) as server:
        expected = server.finish(config, folder / "expected")
        for attempt in range(count):
            run = Run(folder / f"held-{attempt}")
            child = server.start(config, run.path, action="sleep", step=2)
            child.wait_for("asleep")
            before = _names(run.path)
            try:
                train(config, run.path, resume=True, show=False)
                outcome.check(False, f"{run.name}: a second process was let in")
            except UserError as error:
                outcome.check(f"process {child.pid} on " in str(error), f"{run.name}: {error}")
                who = r"process \d+ on \S+ since [\d: -]+"
                outcome.said([re.sub(who, "process PID on HOST since TIME", str(error))], folder)
            outcome.check(_names(run.path) == before, f"{run.name}: the second process changed the folder")
            child.kill(signal.SIGKILL)
            child.exit_code()
            outcome.attempts += 1
            tell(outcome.attempts, count)
            outcome.compare(server.finish(config, run.path), expected)
    return outcome


def _names(folder: Path) -> list[tuple[str, int]]:
    return [(str(path), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
