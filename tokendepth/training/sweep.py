"""A resumable grid of runs, several at once, each trained and evaluated in its own process.

Finished runs are not repeated, interrupted ones are resumed, and a failed one does not affect the others. The run
folders are the only state, so the same call can be repeated until nothing is left to do.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tokendepth.config import RunConfig, from_dict, to_dict
from tokendepth.data.dataset import Split
from tokendepth.errors import Interrupted, SweepStopped, UserError
from tokendepth.runs.files import disk_faults
from tokendepth.runs.run import Run
from tokendepth.training.loop import train
from tokendepth.training.pool import Job, LocalPool, Pool
from tokendepth.training.progress import console, loss_in_words
from tokendepth.training.signals import StopSignals

SILENCE_S = 5
"""Seconds between progress lines if there is no terminal."""


@dataclass
class Outcome:
    runs: list[Run] = field(default_factory=list)
    """Trained and evaluated, in the order of the grid."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name and last output of the runs that failed."""
    left: list[str] = field(default_factory=list)
    """Names of the runs not started or not finished before the deadline."""


@dataclass
class _Worker:
    name: str
    job: Job
    log: Path
    started: float
    line: TaskID
    progress: str = ""

    def last_words(self, code: int) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1].removeprefix("tokendepth: ") if lines else f"exit code {code}"


def sweep(
    configs: dict[str, RunConfig],
    out: Path,
    *,
    on: str = "local",
    workers: int | None = None,
    curve: bool = False,
    tokens: int | None = None,
    split: Split = "val",
    deadline: float | None = None,
    each: Callable[[Run], None] | None = None,
    show: bool = True,
) -> Outcome:
    """Train and evaluate every config into `out/NAME`, `workers` at a time.

    `curve`, `tokens` and `split` are as in `evaluate`. `on` is `local`, or `ray` or `ray:HOST:PORT` for a Ray cluster.
    At the `deadline`, in terms of `time.monotonic()`, runs in progress are saved and left for the next call. `each` is
    called with every run as soon as it is evaluated.
    """
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}; expected 1 or more")
    if on != "local" and on.partition(":")[0] != "ray":
        raise UserError(f"--on is {on!r}; expected local, ray or ray:HOST:PORT")
    todo = {name: config for name, config in configs.items() if not _is_done(out / name, config, curve, split)}
    if on == "local":
        pool = LocalPool(todo, workers)
    else:
        from tokendepth.training.cluster import RayPool

        pool = RayPool(on.partition(":")[2], todo, workers, out, show)
    with disk_faults(out):
        out.mkdir(parents=True, exist_ok=True)
    how = {"curve": curve, "tokens": tokens, "split": split}
    return _Sweep(configs, list(todo), out, pool, how, deadline, each, show).run()


class _Sweep:
    def __init__(
        self,
        configs: dict[str, RunConfig],
        todo: list[str],
        out: Path,
        pool: Pool,
        how: dict,
        deadline: float | None,
        each: Callable[[Run], None] | None,
        show: bool,
    ) -> None:
        self.configs, self.todo, self.out, self.pool, self.how, self.show = configs, todo, out, pool, how, show
        self.deadline, self.each = deadline, each
        self.outcome, self.stop = Outcome(), StopSignals()
        self.running: list[_Worker] = []
        self.spoke = time.monotonic()
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
        done, todo = len(self.configs) - len(self.todo), self.todo
        if done:
            self._say(f"{done} of {len(self.configs)} runs are already finished")
        whole = self.bar.add_task("[bold]all runs", total=len(self.configs), completed=done, numbers="")
        with self.pool if todo else nullcontext(), self.stop, self.bar, self._no_orphans():
            while (todo or self.running) and not self._late():
                room = self.pool.room()
                while todo and len(self.running) < room:
                    self.running.append(self._start(todo.pop(0)))
                time.sleep(0.2)
                self._show()
                for worker in list(self.running):
                    if (code := worker.job.poll()) is not None:
                        self.running.remove(worker)
                        self._finished(worker, code)
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
        """However the sweep ends, except by SIGKILL, its workers first save their runs and exit."""
        try:
            yield
        finally:
            if self.running:
                self._say(f"stopping: saving the {len(self.running)} runs in progress")
            for worker in self.running:
                worker.job.terminate()
            for worker in self.running:
                worker.job.communicate()

    def _start(self, name: str) -> _Worker:
        log, steps = self.out / f"{name}.log", self.configs[name].train.steps
        with disk_faults(log):
            log.unlink(missing_ok=True)
        task = {"config": to_dict(self.configs[name]), "folder": str((self.out / name).absolute()), **self.how}
        line = self.bar.add_task(name, total=steps, numbers="")
        return _Worker(name, self.pool.start(task, log.absolute()), log, time.perf_counter(), line)

    def _show(self) -> None:
        """In a terminal one line per worker; in a log one line for all of them, at intervals."""
        due = self.bar.disable and time.monotonic() > self.spoke + SILENCE_S
        if not self.show or (self.bar.disable and not due):
            return
        for worker in self.running:
            self._look_at(worker)
        if due:
            shown = [f"{worker.name} {worker.progress}" for worker in self.running[:3]]
            others = len(self.running) + len(self.todo) - len(shown)
            self._say("; ".join([*shown, *([f"{others} other runs"] if others else [])]))

    def _look_at(self, worker: _Worker) -> None:
        run = Run(self.out / worker.name)
        try:
            rows = run.last_metrics()
        except UserError:  # being written; if it is damaged, the worker reports it
            return
        row = next((r for r in reversed(rows) if "task_loss" in r), None)
        if row:
            numbers = f"loss {row['task_loss']:.3f}  active {row['active_fraction']:.3f}"
        else:
            numbers = "starting" if worker.log.exists() else "waiting for a node"
        worker.progress = f"step {row['step']}, {numbers}" if row else numbers
        self.bar.update(worker.line, completed=row["step"] if row else 0, numbers=numbers)

    def _finished(self, worker: _Worker, code: int) -> None:
        self.bar.remove_task(worker.line)
        worker.job.communicate()  # closes the pipe
        seconds = f"{time.perf_counter() - worker.started:.0f} s"
        if code == 0:
            run = Run.open(self.out / worker.name)
            if self.each:
                self.each(run)
            hard = (run.evaluation or {})["hard"]
            loss = loss_in_words(hard["loss"], hard.get("bits_per_byte"))
            self._say(f"{worker.name}: loss {loss}, active {hard['active_fraction']:.3f}, {seconds}")
            worker.log.unlink()
        elif not self.stop.received:
            self.outcome.failed[worker.name] = worker.last_words(code)
            self._say(f"{worker.name} failed after {seconds}: {worker.last_words(code)}")

    def _say(self, line: str) -> None:
        self.spoke = time.monotonic()
        if self.show:
            console.print(line, markup=False, soft_wrap=True)


def _is_done(folder: Path, config: RunConfig, curve: bool, split: Split) -> bool:
    """Whether the run is finished, evaluated, and has this config (except the vocabulary, which the corpus sets)."""
    try:
        run = Run.open(folder)
        found, wanted = to_dict(run.config), to_dict(config)
        found["model"]["vocab_size"] = wanted["model"]["vocab_size"]
        return run.finished and _is_evaluated(run, curve, split) and found == wanted
    except UserError:  # missing or unreadable: the worker reports why
        return False


def _is_evaluated(run: Run, curve: bool, split: Split) -> bool:
    """Whether on `split`, and with a curve if one is requested and the method has one."""
    from tokendepth.measure.evaluate import has_curve

    evaluation = run.evaluation
    if evaluation is None or evaluation["split"] != split:
        return False
    return bool(evaluation["curve"] or not (curve and has_curve(run.config)))


def train_and_evaluate(
    config: RunConfig, folder: str | Path, *, curve: bool, tokens: int | None = None, split: Split = "val"
) -> Run:
    """The job of one worker. It times nothing, since the other workers would disturb it."""
    from tokendepth.measure.evaluate import evaluate, has_curve

    run = train(config, folder, resume=True, show=False)
    if not _is_evaluated(run, curve, split):
        how = {"curve": curve and has_curve(config), "tokens": tokens, "split": split}
        run.write_evaluation(evaluate(run, device=config.train.device, timing=False, **how))
    return run


def _end_with_the_sweep() -> None:
    """A killed sweep cannot ask its workers to stop, so each of them stops when its stdin closes."""

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
