"""A resumable grid of runs, several at once, each trained and evaluated in a process of its own.

What is finished is not repeated, what was interrupted goes on where it was, and one that fails leaves the others alone:
the run folders are all the state there is, so the same call is made until nothing is left to do.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tokendepth.config import RunConfig, from_dict, to_dict
from tokendepth.data.dataset import Split
from tokendepth.errors import Interrupted, SweepStopped, UserError
from tokendepth.runs.files import disk_faults
from tokendepth.runs.run import Run
from tokendepth.training.loop import train
from tokendepth.training.progress import console, loss_in_words
from tokendepth.training.signals import StopSignals

GPU_WORKERS = 8
"""Enough small models to keep one GPU busy: a run that trains for 11 s takes 30 more to start, compile and evaluate."""


@dataclass
class Outcome:
    runs: list[Run] = field(default_factory=list)
    """Trained and evaluated, in the order of the grid."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name and last words of those that were not."""
    left: list[str] = field(default_factory=list)
    """For want of time not finished, or not begun."""


@dataclass
class _Worker:
    name: str
    process: subprocess.Popen
    log: Path
    started: float
    line: TaskID

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("tokendepth: ") if lines else f"exit code {self.process.returncode}"


def sweep(
    configs: dict[str, RunConfig],
    out: Path,
    *,
    workers: int | None = None,
    curve: bool = False,
    tokens: int | None = None,
    split: Split = "val",
    deadline: float | None = None,
    each: Callable[[Run], None] | None = None,
    show: bool = True,
) -> Outcome:
    """Train and evaluate every config into `out/NAME`, `workers` at a time.

    `curve`, `tokens` and `split` are as in `evaluate`.
    At the `deadline`, a reading of `time.monotonic()`, whatever runs is saved and left for the next call. `each` is
    told of every run as soon as it is evaluated.
    """
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}; expected 1 or more")
    with disk_faults(out):
        out.mkdir(parents=True, exist_ok=True)
    how = {"curve": curve, "tokens": tokens, "split": split}
    return _Sweep(configs, out, workers or _default_workers(configs), how, deadline, each, show).run()


def _default_workers(configs: dict[str, RunConfig]) -> int:
    import torch

    on_gpu = torch.cuda.is_available() and any(c.train.device != "cpu" for c in configs.values())
    return min(GPU_WORKERS, max(1, (os.cpu_count() or 2) // 2)) if on_gpu else 1


class _Sweep:
    def __init__(
        self,
        configs: dict[str, RunConfig],
        out: Path,
        workers: int,
        how: dict,
        deadline: float | None,
        each: Callable[[Run], None] | None,
        show: bool,
    ) -> None:
        self.configs, self.out, self.workers, self.how, self.show = configs, out, workers, how, show
        self.deadline, self.each = deadline, each
        self.outcome, self.stop = Outcome(), StopSignals()
        self.running: list[_Worker] = []
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not (show and console.is_terminal),
        )

    def run(self) -> Outcome:
        wanted = {name: self.how[name] for name in ("curve", "split")}
        todo = [name for name, config in self.configs.items() if not _is_done(self.out / name, config, **wanted)]
        done = len(self.configs) - len(todo)
        if done:
            self._say(f"{done} of {len(self.configs)} runs are finished already")
        whole = self.bar.add_task("[bold]all runs", total=len(self.configs), completed=done, numbers="")
        with self.stop, self.bar, self._no_orphans():
            while (todo or self.running) and not self._late():
                while todo and len(self.running) < self.workers:
                    self.running.append(self._start(todo.pop(0)))
                time.sleep(0.2)
                for worker in self.running:
                    self._show(worker)
                for worker in [w for w in self.running if w.process.poll() is not None]:
                    self.running.remove(worker)
                    self._finished(worker)
                    self.bar.advance(whole)
                if self.stop.received:
                    raise SweepStopped(self.stop.received, self.out)
        self.outcome.left = [*(worker.name for worker in self.running), *todo]
        absent = {*self.outcome.failed, *self.outcome.left}
        self.outcome.runs = [Run.open(self.out / name) for name in self.configs if name not in absent]
        return self.outcome

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    @contextmanager
    def _no_orphans(self) -> Iterator[None]:
        """Whatever ends the sweep, short of killing it, its workers save what they have and end first."""
        try:
            yield
        finally:
            for worker in self.running:
                worker.process.terminate()
            for worker in self.running:
                worker.process.communicate()

    def _start(self, name: str) -> _Worker:
        log, folder = self.out / f"{name}.log", self.out / name
        package = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        task = {"config": to_dict(self.configs[name]), "folder": str(folder), **self.how}
        threads = str(max(1, (os.cpu_count() or 1) // self.workers))
        with disk_faults(log), log.open("w") as words:
            process = subprocess.Popen(
                [sys.executable, "-m", "tokendepth.training.sweep", json.dumps(task)],
                env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,  # never written to: its end is the sweep's
                stdout=words,
                stderr=words,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its workers to stop
            )
        line = self.bar.add_task(name, total=self.configs[name].train.steps, numbers="starting")
        return _Worker(name, process, log, time.perf_counter(), line)

    def _show(self, worker: _Worker) -> None:
        if self.bar.disable or not (self.out / worker.name / "metrics.jsonl").exists():
            return
        rows = Run(self.out / worker.name).last_metrics()
        row = next((r for r in reversed(rows) if "task_loss" in r), None)
        if row:
            numbers = f"loss {row['task_loss']:.3f}  active {row['active_fraction']:.3f}"
            self.bar.update(worker.line, completed=row["step"], numbers=numbers)

    def _finished(self, worker: _Worker) -> None:
        self.bar.remove_task(worker.line)
        worker.process.communicate()  # closes the pipe
        seconds = f"{time.perf_counter() - worker.started:.0f} s"
        if worker.process.returncode == 0:
            run = Run.open(self.out / worker.name)
            if self.each:
                self.each(run)
            hard = (run.evaluation or {})["hard"]
            loss = loss_in_words(hard["loss"], hard.get("bits_per_byte"))
            self._say(f"{worker.name}: loss {loss}, active {hard['active_fraction']:.3f}, {seconds}")
            worker.log.unlink()
        elif not self.stop.received:
            self.outcome.failed[worker.name] = worker.last_words()
            self._say(f"{worker.name} failed after {seconds}: {worker.last_words()}")

    def _say(self, line: str) -> None:
        if self.show:
            console.print(line, markup=False, soft_wrap=True)


def _is_done(folder: Path, config: RunConfig, curve: bool, split: Split) -> bool:
    """Finished, evaluated, and of this very config (the vocabulary apart, which only the corpus knows)."""
    try:
        run = Run.open(folder)
        found, wanted = to_dict(run.config), to_dict(config)
        found["model"]["vocab_size"] = wanted["model"]["vocab_size"]
        return run.finished and _is_evaluated(run, curve, split) and found == wanted
    except UserError:  # not there, or not readable: the worker says what is wrong
        return False


def _is_evaluated(run: Run, curve: bool, split: Split) -> bool:
    """On that split, with its curve, where one is asked for and can be had."""
    from tokendepth.measure.evaluate import has_curve

    evaluation = run.evaluation
    if evaluation is None or evaluation["split"] != split:
        return False
    return bool(evaluation["curve"] or not (curve and has_curve(run.config)))


def train_and_evaluate(
    config: RunConfig, folder: str | Path, *, curve: bool, tokens: int | None = None, split: Split = "val"
) -> Run:
    """What one worker does. Times are not taken: its neighbours would be in them."""
    from tokendepth.measure.evaluate import evaluate, has_curve

    run = train(config, folder, resume=True, show=False)
    if not _is_evaluated(run, curve, split):
        how = {"curve": curve and has_curve(config), "tokens": tokens, "split": split}
        run.write_evaluation(evaluate(run, device=config.train.device, timing=False, **how))
    return run


def _end_with_the_sweep() -> None:
    """A sweep that is killed cannot ask its workers to stop; each hears of it by the end of its input, and stops."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _end_with_the_sweep()
    try:
        task = json.loads(sys.argv[1])
        train_and_evaluate(from_dict(task.pop("config")), **task)
    except UserError as error:
        sys.exit(f"tokendepth: {error}")
    except Interrupted as stopped:
        sys.exit(stopped.exit_code)
