"""Progress of long tasks on stderr: a bar in a terminal, a plain line every five seconds in a log.

    with Progress("evaluating runs/tsa", len(batches), unit="batches") as progress:
        for batch in batches:
            ...
            progress.advance()

A task inside a task is a second bar in a terminal; a log shows only the innermost one. A task of less than five seconds
leaves nothing in a log, unless it follows another task. Print lines that must stay with `console`, which knows about
the bars.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from tokendepth.streams import lenient_stderr

EVERY_S = 5.0

console = Console(stderr=True, highlight=False)

_open: list["Progress"] = []
"""The running tasks, the innermost last."""
_next_line = -math.inf
"""When the next line is due in a log, by `time.monotonic`; several short tasks count as one long one."""


class Progress:
    """A task of `total` units (None: unknown), of which `done` are done before it begins.

    Silent with `show=False`, and in every rank but the first. It works without a stderr too.
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
                outermost = _open[0] if _open else None
                _open.append(self)
                held.callback(_open.remove, self)
                stays = self.total is not None
                self._bars = outermost._bars if outermost else held.enter_context(_display(stays=stays))
                if self._bars:
                    self._task = self._bars.add_task(self.title, count="", note="")
                    if outermost:
                        held.callback(self._bars.remove_task, self._task)
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
        """`note`: a few words about the current work or its result."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        if self._bars:
            counts = {"completed": self.done, "total": self.total}
            self._bars.update(self._task, **counts, count=self._count(), note=self.note)

    def _count(self) -> str:
        if self.total is None:
            return f"{self.done:,.0f} {self.unit}" if self.unit else ""
        return f"{self.done:,.0f}/{self.total:,.0f} {self.unit}".strip()

    def _print(self) -> None:
        seconds = time.monotonic() - self._start
        parts = [self._count(), self.note, f"{_clock(seconds)} elapsed"]
        taken = self.done - self._done_before
        if self.total is not None and taken > 0 and self.done < self.total:
            parts.append(f"about {_clock(seconds * (self.total - self.done) / taken)} left")
        console.print(f"{self.title}: {', '.join(filter(None, parts))}", markup=False, soft_wrap=True)


class _Note(ProgressColumn):
    """The first column that is shortened in a narrow terminal."""

    def __init__(self) -> None:
        super().__init__(Column())

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def _display(*, stays: bool) -> Iterator[Bars | None]:
    """Show the running tasks: as bars in a terminal (the first may stay there), otherwise as lines from a thread."""
    with lenient_stderr():
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[count]}", markup=False),
                TimeElapsedColumn(Column(no_wrap=True)),
                TimeRemainingColumn(table_column=Column(no_wrap=True)),
                _Note(),
            )
            # While bars move, rich would redirect stdout to stderr too, and miss the file that it goes to.
            to_terminal = sys.stdout.isatty()
            with Bars(*columns, console=console, redirect_stdout=to_terminal, transient=not stays) as bars:
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
    """In a thread, so that lines appear during a long step too."""
    global _next_line
    if time.monotonic() > _next_line + EVERY_S:  # the last task ended long ago
        _next_line = time.monotonic() + EVERY_S
    while not ended.wait(max(0.0, _next_line - time.monotonic())):
        _open[-1]._print()
        _next_line = time.monotonic() + EVERY_S


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
