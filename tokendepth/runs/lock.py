"""One process at a time trains into a run folder.

The lock is the kernel's (`flock`), so a process that is killed cannot leave it behind; the file that it is taken on
only says who holds it. Those who only read a run need no lock. Where there is no `flock` (Windows, some network file
systems) nobody is locked out, and it is on the user not to start two.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tokendepth.errors import UserError
from tokendepth.runs.files import disk_faults
from tokendepth.runs.run import LOCK


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold `folder`, made if it is not there, against other trainings; a UserError names the one that holds it."""
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = _locked(folder / LOCK)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a disk that has become read-only keeps the file, without the lock
            (folder / LOCK).unlink()
        os.close(handle)


def wait_until_free(folder: Path, seconds: float) -> None:
    """Wait until nobody trains into `folder`, at most so many seconds."""
    until = time.monotonic() + seconds
    while (folder / LOCK).exists() and time.monotonic() < until:
        try:
            with only_one(folder):
                return
        except UserError:
            time.sleep(0.2)


def _locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            if not _is_at(handle, path):  # the one before removed it between our opening and locking it
                os.close(handle)
                continue
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
            return handle
        except BaseException:
            os.close(handle)
            raise


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace") or "another process"
        raise UserError(
            f"{path.parent} is being trained by {holder}; this second training has changed nothing; "
            "wait for the first, stop it, or choose another --out"
        ) from None
    except OSError:
        return


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
