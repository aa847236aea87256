"""What is in the place of a file (`benchmarks.faults.special`) is answered at once and in little memory."""

import contextlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.outcome import limit
from benchmarks.faults.special import SPECIAL

LONGEST_S = 20  # on a machine that is busy; a pipe would take for ever
MOST_MEMORY = 50_000_000


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Fail what waits for a pipe, or reads without end."""
    tracemalloc.start()
    try:
        with limit(LONGEST_S):
            yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def replaced(path: Path, kind: str) -> None:
    path.unlink()
    SPECIAL[kind](path)
