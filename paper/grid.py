"""Runs of which a results file has no row yet, trained, evaluated and written down one by one.

The row is what counts: a run whose row is there is not repeated, also where its folder is gone, as on a machine that
was handed back. The folders are what an interrupted call goes on from.
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

# What a run is called, where it ran and how often it spoke do not change what it is.
NO_PART_OF_IT = {
    "model": ("vocab_size",),
    "retrofit": ("base",),
    "train": ("device", "compile", "tensorboard", "log_every", "checkpoint_every", "eval_every"),
}


@cache
def same(config: RunConfig, *, seed: bool = True) -> str:
    """Equal for two configs that are the same experiment; `seed` tells its runs apart."""
    tree = to_dict(config)
    del tree["recipe"]
    for part, names in NO_PART_OF_IT.items():
        for name in names:
            tree.get(part, {}).pop(name, None)
    if not seed:
        del tree["train"]["seed"]
    return json.dumps(tree, sort_keys=True)


def work_of(config: RunConfig) -> RunConfig:
    """What its steps and passes compute: how long and at what rate it trains is no part of that."""
    kept = {name: getattr(config.train, name) for name in ("batch_size", "accumulate", "dtype")}
    return replace(config, train=TrainConfig(**kept))


def same_work(config: RunConfig) -> str:
    """Equal for two configs whose steps, and whose passes, compute the same."""
    return same(work_of(config))


@dataclass
class Progress:
    failed: dict[str, str] = field(default_factory=dict)
    """Name and last words of the runs that failed."""
    left: list[str] = field(default_factory=list)
    """What there was no time for; the next call goes on with it."""

    def add(self, other: "Progress") -> None:
        self.failed |= other.failed
        self.left += other.left


@dataclass(frozen=True)
class Deadline:
    at: float | None = None
    """A reading of `time.monotonic()`; none is never."""

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
    """A study that is stopped is gone on with by the same line: what it trains has --resume, it has not."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted) as stopped:
        number = stopped.exit_code - 128 if isinstance(stopped, Interrupted) else signal.SIGINT
        raise SweepStopped(number, out) from None


def missing(configs: dict[str, RunConfig], *paths: Path) -> dict[str, RunConfig]:
    """Those configs of which none of the results files at `paths` has a row."""
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
    """Give every config a row in the results file at `path`, as far as time allows; `each` also hears of every run.

    `also` gives a row more columns; `tokens` and `split` are what runs are evaluated on, `curve` whether at every point
    of a dial.
    `in_order` takes the runs as they are given, instead of all first seeds first.
    `here` trains in this process, one after the other: for runs that take less time than a process takes to start.
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
        unwritten = missing(configs, path)  # finished before, by a call that was cut short
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
    """`write` in a thread: what a row holds takes seconds to compute, in which a sweep would start no run.

    What it raises is raised with the next row, or at the end. Rows that are left when a sweep stops are written by the
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
    """Neighbours then differ in shape: the seeds of one, begun at once, would each compile what one of them can."""
    return dict(sorted(configs.items(), key=lambda one: one[1].train.seed))


def _compiled(configs: dict[str, RunConfig], out: Path) -> dict[str, RunConfig]:
    """Many runs of few shapes: what the first of a shape compiles, the others find in the compiler's cache.

    A run that was begun goes on as it was begun.
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
    """What any row about a run begins with."""
    return {"name": run.name, "config": to_dict(run.config)}


def history(run: Run) -> list[Row]:
    """The validations of a run: what its curves are drawn from."""
    names = ("step", "tlops", "val_loss", "val_active_fraction")
    return [{name: metrics[name] for name in names} for metrics in run.metrics() if "val_loss" in metrics]
