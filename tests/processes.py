"""Other processes, as tests see them."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from tokendepth.runs.run import LOCK, Run


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether the process with this id runs; a zombie does not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def trainer(run: Run) -> int:
    """The process that trains into its folder."""
    found = re.match(r"process (\d+) ", (run.path / LOCK).read_text())
    assert found
    return int(found[1])


def saved_step(run: Run) -> int:
    """The newest one; 0 before the first and after the end."""
    return max((int(path.name[5:]) for path in run.checkpoints.glob("step-*")), default=0)
