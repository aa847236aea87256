"""Whatever can be in the place of a file: a pipe, a device, a file without end, a folder, a link."""

import contextlib
import os
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

STOPPED = Path(__file__).parent / "golden" / "format-1" / "stopped"
LONGEST_S = 20  # on a machine that is busy; a pipe would take for ever
MOST_MEMORY = 50_000_000


class Late(BaseException):
    """No OSError, which would be told in one line as if it were the disk's."""


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**12)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": device,
    "a terabyte": endless,
    "folder": lambda path: path.mkdir(),
    "folder with something in it": lambda path: shutil.copytree(STOPPED, path),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Fail what waits for a pipe, or reads without end."""

    def late(number, frame):
        raise Late(f"not done after {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replaced(path: Path, kind: str) -> None:
    path.unlink()
    SPECIAL[kind](path)
