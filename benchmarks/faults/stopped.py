"""Runs that end before their time, in this process."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokendepth.config import RunConfig
from tokendepth.runs.run import Run
from tokendepth.training.loop import _Training, train


class Stopped(Exception):
    """Stands for whatever ends a process."""


@contextlib.contextmanager
def at_step(chosen: int, action: Callable[[Any], object]) -> Iterator[None]:
    """Let every training do `action` before it takes step number `chosen` (from 0)."""
    real = _Training._step

    def wrapped(self: _Training, step: int) -> None:
        if step == chosen:
            action(self)
        real(self, step)

    _Training._step = wrapped
    try:
        yield
    finally:
        _Training._step = real


def stopped_run(config: RunConfig, out: Path, step: int) -> Run:
    """A run that ended before it took step number `step`."""

    def stop(training: Any) -> None:
        raise Stopped

    with at_step(step, stop), contextlib.suppress(Stopped):
        train(config, out, show=False)
    return Run(out)
