"""Disks that are full and folders that cannot be written, from a random step on.

The full disk is a small tmpfs, mounted in a namespace of its own: `unshare -rm python -m benchmarks.faults.disk`.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.faults.outcome import Outcome, Tell, package_environment, subject
from benchmarks.faults.stopped import at_step
from tokendepth.config import RunConfig
from tokendepth.errors import UserError
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

STEPS = 8
NOBODY = 65534


def full(folder: Path, count: int, tell: Tell) -> Outcome:
    """From a random step on there is room for less than a checkpoint."""
    alone = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        return Outcome(skipped="no small disk can be mounted here (unshare -rm is not allowed)")
    command = [*alone, sys.executable, "-m", "benchmarks.faults.disk", str(folder), str(count)]
    with subprocess.Popen(command, env=package_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            told = json.loads(line)
            if isinstance(told, list):
                tell(*told)
            else:
                return Outcome(**told)
    raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")


def read_only(folder: Path, count: int, tell: Tell) -> Outcome:
    """From a random step on the run folder is read-only. Root, who could still write, becomes `nobody` for this."""
    with tempfile.TemporaryDirectory() as place:  # accessible to the user nobody
        os.chmod(place, 0o755)
        return _disturb(folder, Path(place), count, tell, _forbidden, "permission denied")


def _disturb(
    folder: Path,
    place: Path,
    count: int,
    tell: Tell,
    trouble: Callable[[Run, random.Random], contextlib.AbstractContextManager],
    told: str,
) -> Outcome:
    """Train in `place` with `trouble` from a random step on: a one-line error, last checkpoint intact, the same end."""
    outcome, dice = Outcome(), random.Random(3)
    config = subject(folder, steps=STEPS)
    expected = train(config, folder / "expected", show=False)
    for attempt in range(count):
        run, step, quiet = Run(place / f"run-{attempt}"), dice.randrange(1, STEPS), attempt % 2 == 0
        with outcome.attempt(run.name):
            with contextlib.ExitStack() as troubled:
                begin = _beginning(troubled, trouble, run, dice)
                try:
                    with at_step(step, begin):
                        train(_quiet(config) if quiet else config, run.path, show=False)
                    outcome.check(False, f"{run.name}: not noticed")
                except UserError as error:
                    outcome.check(told in str(error) and str(run.path) in str(error), f"{run.name}: {error}")
                    outcome.said([str(error)], run.path)
            checkpoint, skipped = run.load_checkpoint()
            found = checkpoint.step if checkpoint else None
            outcome.check(
                found == step and not skipped, f"{run.name}: step {step} was saved, {found} is there; {skipped}"
            )
            train(_quiet(config) if quiet else config, run.path, resume=True, show=False)
            outcome.compare(run, expected, metrics=not quiet)
            shutil.rmtree(run.path)
        tell(outcome.attempts, count)
    return outcome


def _beginning(troubled: contextlib.ExitStack, trouble: Callable, run: Run, dice: random.Random) -> Callable:
    return lambda training: troubled.enter_context(trouble(run, dice))


def _quiet(config: RunConfig) -> RunConfig:
    """Without rows of metrics it is the checkpoint that fails first; with them it may be they."""
    return replace(config, train=replace(config.train, log_every=1000, eval_every=1000))


@contextlib.contextmanager
def _forbidden(run: Run, dice: random.Random) -> Iterator[None]:
    folders = [run.path, run.checkpoints]
    for folder in folders:
        folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        for folder in folders:
            folder.chmod(0o755)


@contextlib.contextmanager
def _full(run: Run, dice: random.Random) -> Iterator[None]:
    size = max(path.stat().st_size for path in run.checkpoints.rglob("*.safetensors"))
    free = os.statvfs(run.path).f_bavail * os.statvfs(run.path).f_frsize
    ballast = run.path.parent / "ballast"
    ballast.write_bytes(bytes(free - dice.randrange(size)))
    try:
        yield
    finally:
        ballast.unlink()


def main() -> None:
    torch.set_num_threads(1)
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    place = folder / "small disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)

    def tell(done: int, total: int) -> None:
        print(json.dumps([done, total]), flush=True)

    outcome = _disturb(folder, place, count, tell, _full, "no space is left")
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
