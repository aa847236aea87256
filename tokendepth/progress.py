"""How far a long task is, on stderr: a bar in a terminal, in a log a plain line every five seconds.

    with Progress("evaluating runs/tsa", len(batches), unit="batches") as progress:
        for batch in batches:
            ...
            progress.advance()

A task inside a task is a second bar in a terminal; a log is told of the innermost one. What takes less than five
seconds leaves nothing in a log. A line that is to stay is printed by `console`, which knows of the bars.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from tokendepth.streams import lenient_stderr

EVERY_S = 5.0

console = Console(stderr=True, highlight=False)

_open: list["Progress"] = []
"""The tasks that are shown, the innermost last."""


class Progress:
    """A task of `total` units, or of nobody knows how many; `done` of them before it begins.

    Quiet with `show=False`, and in every rank but the first. Nothing is lost where stderr is gone.
    """

    def __init__(
        self, title: str, total: float | None = None, *, unit: str = "", done: float = 0, show: bool = True
    ) -> None:
        self.title, self.total, self.unit, self.done, self.note = title, total, unit, done, ""
        self.show = show and os.environ.get("RANK", "0") == "0"
        self._done_before, self._start = done, time.monotonic()
        self._bars: Bars | None = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        with contextlib.ExitStack() as held:
            if self.show:
                self._bars = _open[0]._bars if _open else held.enter_context(_display())
                if self._bars:
                    self._task = self._bars.add_task(self.title, words="")
                    if _open:  # the outermost bar stays on the screen
                        held.callback(self._bars.remove_task, self._task)
                _open.append(self)
                held.callback(_open.remove, self)
                self.update()
            self._held = held.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()

    @property
    def live(self) -> bool:
        """Whether it is a bar in a terminal."""
        return self._bars is not None

    def advance(self, by: float = 1) -> None:
        self.update(self.done + by)

    def update(self, done: float | None = None, *, total: float | None = None, note: str | None = None) -> None:
        """`note`: what is being done, or how well, in a few words."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        if self._bars:
            words = "  ".join(filter(None, [self._count(), self.note]))
            self._bars.update(self._task, completed=self.done, total=self.total, words=words)

    def _count(self) -> str:
        if self.total is None:
            return f"{self.done:,.0f} {self.unit}" if self.unit else ""
        return f"{self.done:,.0f}/{self.total:,.0f} {self.unit}".strip()

    def _print(self) -> None:
        seconds = time.monotonic() - self._start
        parts = [self._count(), self.note, f"{_clock(seconds)} elapsed"]
        taken = self.done - self._done_before
        if self.total is not None and taken > 0:
            parts.append(f"about {_clock(seconds * (self.total - self.done) / taken)} left")
        console.print(f"{self.title}: {', '.join(filter(None, parts))}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _display() -> Iterator[Bars | None]:
    """What shows the open tasks: bars in a terminal, else a thread that prints lines."""
    with lenient_stderr():
        if console.is_terminal and not console.is_dumb_terminal:
            columns = [TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=20)]
            columns += [TextColumn("{task.fields[words]}", markup=False), TimeElapsedColumn(), TimeRemainingColumn()]
            # While bars move, rich would send what is printed to stdout to stderr too, past a file it was meant for.
            with Bars(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bars:
                yield bars
        else:
            ended = threading.Event()
            thread = threading.Thread(target=_print_lines, args=(ended,), daemon=True)
            thread.start()
            try:
                yield None
            finally:
                ended.set()
                thread.join()


def _print_lines(ended: threading.Event) -> None:
    """By a thread, so that a step that takes long is no silence."""
    while not ended.wait(EVERY_S):
        for task in _open[-1:]:
            task._print()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
