"""Trains and evaluates the runs that have no row in a results file yet, and writes their rows one by one.

Only the row counts: a run with a row is not repeated, even if its folder is gone. An interrupted call continues from
the folders.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tokendepth import progress
from tokendepth.config import RunConfig, TrainConfig, from_dict, to_dict
from tokendepth.data.dataset import Split
from tokendepth.errors import Interrupted, SweepStopped, UserError
from tokendepth.report.results import row
from tokendepth.runs.results import Row, add_rows, read_rows
from tokendepth.runs.run import Run

# The name of a run, its device and how often it logs do not make it a different experiment.
NO_PART_OF_IT = {
    "model": ("vocab_size",),
    "retrofit": ("base",),
    "train": ("device", "compile", "tensorboard", "log_every", "checkpoint_every", "eval_every"),
}


@cache
def same(config: RunConfig, *, seed: bool = True) -> str:
    """Equal for configs of the same experiment; with `seed`, also of the same seed."""
    tree = to_dict(config)
    del tree["recipe"]
    for part, names in NO_PART_OF_IT.items():
        for name in names:
            tree.get(part, {}).pop(name, None)
    if not seed:
        del tree["train"]["seed"]
    return json.dumps(tree, sort_keys=True)


def work_of(config: RunConfig) -> RunConfig:
    """What its steps and passes compute, without the length of training and the learning rate."""
    kept = {name: getattr(config.train, name) for name in ("batch_size", "accumulate", "dtype")}
    return replace(config, train=TrainConfig(**kept))


def same_work(config: RunConfig) -> str:
    """Equal for configs whose training steps and forward passes compute the same."""
    return same(work_of(config))


@dataclass
class Progress:
    failed: dict[str, str] = field(default_factory=dict)
    """Name and last message of the runs that failed."""
    left: list[str] = field(default_factory=list)
    """What there was no time for; the next call continues with it."""

    def add(self, other: "Progress") -> None:
        self.failed |= other.failed
        self.left += other.left


@dataclass(frozen=True)
class Deadline:
    at: float | None = None
    """A reading of `time.monotonic()`; None is never."""

    @classmethod
    def after(cls, minutes: float | None) -> "Deadline":
        return cls(None if minutes is None else time.monotonic() + 60 * minutes)

    def passed(self) -> bool:
        return self.at is not None and time.monotonic() > self.at


MOST_SEEDS = 1000


def check_size(seeds: int | None, max_minutes: float | None) -> None:
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds is {seeds}; expected a number from 1 to {MOST_SEEDS}")
    if max_minutes is not None and not max_minutes > 0:
        raise UserError(f"--max-minutes is {max_minutes:g}; expected a number above 0")


@contextlib.contextmanager
def repeatable(out: Path) -> Iterator[None]:
    """A stopped study continues with the same command: its runs have --resume, the study has not."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as stopped:
        number = stopped.exit_code - 128 if isinstance(stopped, Interrupted) else signal.SIGINT
        raise SweepStopped(number, out) from None


def missing(configs: dict[str, RunConfig], *paths: Path) -> dict[str, RunConfig]:
    """The configs that have no row in any of the results files at `paths`."""
    there = {same(from_dict(row["config"])) for path in paths if path.exists() for row in read_rows(path)}
    found: dict[str, RunConfig] = {}
    for name, config in configs.items():
        if (key := same(config)) not in there:
            there.add(key)
            found[name] = config
    return found


def fill(
    configs: dict[str, RunConfig],
    out: Path,
    path: Path,
    deadline: Deadline,
    *,
    each: Iterable[Callable[[Run], None]] = (),
    also: Callable[[Run], Row] | None = None,
    workers: int | None = None,
    tokens: int | None = None,
    split: Split = "val",
    curve: bool = True,
    in_order: bool = False,
    here: bool = False,
    show: bool = True,
) -> Progress:
    """Give every config a row in the results file at `path`, as far as time allows; `each` is called with every run.

    `also` adds columns to a row. Runs are evaluated on `tokens` of `split`, with `curve` at every point of a dial.
    `in_order` keeps the order of the runs instead of taking all first seeds first.
    `here` trains in this process, one run after the other: for runs that take less time than starting a process.
    """
    from tokendepth.training.sweep import sweep, train_and_evaluate

    todo = missing(configs, path)
    if not here:
        todo = _compiled(todo if in_order else first_seeds_first(todo), out)

    def write(run: Run) -> None:
        for hear in each:
            hear(run)
        more = also(run) if also else {}
        add_rows(path, [{**row(run), "history": history(run), **more}], identity=("config",))

    if not here:
        how = {"curve": curve, "tokens": tokens, "split": split}
        with _writing(write) as later:
            outcome = sweep(todo, out, workers=workers, deadline=deadline.at, each=later, show=show, **how)
        unwritten = missing(configs, path)  # finished by an earlier call that was cut short
        for run in outcome.runs:
            if run.name in unwritten:
                write(run)
        return Progress(outcome.failed, outcome.left)
    names = list(todo)
    with progress.Progress("training and evaluating", len(names), unit="runs", show=show) as shown:
        while names and not deadline.passed():
            shown.update(note=names[0])
            write(train_and_evaluate(todo[names[0]], out / names[0], curve=curve, tokens=tokens, split=split))
            del names[0]
            shown.advance()
    return Progress({}, names)


@contextlib.contextmanager
def _writing(write: Callable[[Run], None]) -> Iterator[Callable[[Run], None]]:
    """`write` in a thread: a row takes seconds to compute, during which a sweep would not start a run.

    Its errors are raised with the next row, or at the end. Rows that are left when a sweep stops are written by the
    next call.
    """
    writer, begun = ThreadPoolExecutor(1), list[Future[None]]()

    def later(run: Run) -> None:
        for one in begun:
            if one.done():
                one.result()
        begun.append(writer.submit(write, run))

    try:
        yield later
        for one in begun:
            one.result()
    finally:
        writer.shutdown(cancel_futures=True)


def first_seeds_first(configs: dict[str, RunConfig]) -> dict[str, RunConfig]:
    """So that neighbours differ in shape: seeds of one shape that start together would each compile the same code."""
    return dict(sorted(configs.items(), key=lambda one: one[1].train.seed))


def _compiled(configs: dict[str, RunConfig], out: Path) -> dict[str, RunConfig]:
    """Many runs of few shapes: what the first of a shape compiles, the others find in the compiler's cache.

    A run that was started continues as it was started.
    """
    from torch.cuda import is_available

    useful = is_available() and find_spec("triton") is not None

    def choice(name: str, config: RunConfig) -> Literal["auto", "on", "off"]:
        with contextlib.suppress(UserError):  # a damaged folder: `train` will say so
            if (out / name / "config.json").exists() and same(there := Run(out / name).config) == same(config):
                return there.train.compile
        return (
            "on" if config.train.compile == "auto" and config.train.device != "cpu" and useful else config.train.compile
        )

    return {n: replace(c, train=replace(c.train, compile=choice(n, c))) for n, c in configs.items()}


def identity_row(run: Run) -> Row:
    """The first columns of any row about a run."""
    return {"name": run.name, "config": to_dict(run.config)}


def history(run: Run) -> list[Row]:
    """The validations of a run, for its curves."""
    names = ("step", "tlops", "val_loss", "val_active_fraction")
    return [{name: metrics[name] for name in names} for metrics in run.metrics() if "val_loss" in metrics]
