"""The progress of a command in its log."""

import io
import re

import pytest
from rich.console import Console

from tokendepth import progress
from tokendepth.progress import Progress


class Log:
    """The lines that a log would have if a command were so slow that every update made one."""

    def __init__(self) -> None:
        self.file = io.StringIO()

    def about(self, title: str) -> list[str]:
        lines = [line for line in self.file.getvalue().splitlines() if line.startswith(title)]
        assert lines, self.file.getvalue()
        return lines

    def check_told(self, title: str, unit: str) -> None:
        """From nothing to everything, with the time that is left."""
        lines = self.about(title)
        found = [(line, re.search(rf": ([\d,]+)/([\d,]+) {unit}, .*elapsed", line)) for line in lines]
        counts = [(line, [int(n.replace(",", "")) for n in count.groups()]) for line, count in found if count]
        assert counts[0][1][0] == 0, lines
        assert counts[-1][1][0] == counts[-1][1][1] > 0, lines
        for line, (done, total) in counts:
            assert not 0 < done < total or re.search(r"about \d:\d\d:\d\d left$", line), line


def every_update(monkeypatch: pytest.MonkeyPatch) -> Log:
    found, update = Log(), Progress.update

    def updated(self: Progress, *numbers: float, **words: object) -> None:
        update(self, *numbers, **words)
        if self.show:
            self._print()

    monkeypatch.setattr(progress, "console", Console(file=found.file, highlight=False, width=200))
    monkeypatch.setattr(Progress, "update", updated)
    return found
