"""Only one process at a time can train into a run folder.

The lock is an `flock`, so a killed process cannot leave it behind. It is taken twice: on the folder, which stays locked
whatever is removed from it, and on a file in it, which names the holder and can be locked on NFS. Reading a run needs
no lock. Without `flock` (Windows, some network file systems) nothing is locked, and users must not start two trainings.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tokendepth.checks import printable
from tokendepth.errors import UserError
from tokendepth.runs.files import disk_faults, make_folder, regular
from tokendepth.runs.run import LOCK

try:
    import fcntl
except ImportError:
    fcntl = None

SIGNATURE = b"process "
LONGEST = 1000  # bytes of a lock file
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
TRIES = 100
NO_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""Errors from opening a pipe, a folder or a link as a file."""


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is created if missing, against other trainings; a UserError names the current holder."""
    with contextlib.ExitStack() as held:
        with disk_faults(folder):
            make_folder(folder)
            if fcntl:
                handle = os.open(folder, os.O_RDONLY)
                held.callback(os.close, handle)
                _lock(handle, folder)
            if not any(_lock_file(folder / LOCK, held) for _ in range(TRIES)):
                raise _in_the_way(folder / LOCK)
        yield


def wait_until_free(folder: Path, seconds: float) -> None:
    """Wait at most `seconds` until no process trains into `folder`."""
    until = time.monotonic() + seconds
    while (folder / LOCK).exists() and time.monotonic() < until:
        try:
            with only_one(folder):
                return
        except UserError:
            time.sleep(0.2)


def _lock_file(path: Path, held: contextlib.ExitStack) -> bool:
    """Lock the file at `path`; False if its previous holder removed it between our opening and locking it."""
    with contextlib.ExitStack() as opened:
        try:
            handle = regular(str(path), os.O_RDWR | os.O_CREAT | NO_FOLLOW)
        except OSError as error:
            if error.errno in NO_FILE:
                raise _in_the_way(path) from None
            raise
        opened.callback(os.close, handle)
        _lock(handle, path.parent)
        if not _is_at(handle, path):
            return False
        if not _may_be_ours(handle):
            raise _in_the_way(path)
        os.lseek(handle, 0, os.SEEK_SET)
        os.truncate(handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(handle, SIGNATURE + f"{os.getpid()} on {socket.gethostname()} since {since}".encode())
        held.push(opened.pop_all())
        held.callback(_remove, handle, path)
        return True


def _may_be_ours(handle: int) -> bool:
    """Whether this is a lock file, or what a power cut left of one: zeros, or its beginning. No hard links."""
    facts, content = os.fstat(handle), os.read(handle, LONGEST).strip(b"\0")
    return facts.st_nlink <= 1 and facts.st_size <= LONGEST and content.startswith(SIGNATURE[: len(content)])


def _lock(handle: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{folder} is being trained by {_holder(folder / LOCK)}; this second training has changed nothing; "
            "wait for the first, stop it, or choose another --out"
        ) from None
    except OSError:
        return


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        handle = regular(str(path), os.O_RDONLY | NO_FOLLOW)
        try:
            content = os.read(handle, LONGEST)
        finally:
            os.close(handle)
        if content.startswith(SIGNATURE):
            return printable(content.decode(errors="replace"))
    return "another process"


def _in_the_way(path: Path) -> UserError:
    return UserError(f"{path} is not a lock file of tokendepth and stays as it is; move it away and repeat the command")


def _remove(handle: int, path: Path) -> None:
    with contextlib.suppress(OSError):  # on a disk that became read-only the file stays, unlocked
        if _is_at(handle, path):
            path.unlink()


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False
