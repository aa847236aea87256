"""stdout and stderr that survive a closed pipe, a full disk, or being closed from the start.

Messages on stderr are a courtesy: if they cannot be written, they are dropped and the work continues. Output on stdout
is a result: if it cannot be written, the command ends without a traceback.
"""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from tokendepth.errors import ReaderGone, UserError

PATIENCE_S = 1.0
"""Seconds that a stalled reader of stderr, such as a pager, may delay the work."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """For a whole command: stderr never fails, stdout fails with ReaderGone or a UserError."""
    _fill_closed_descriptors()
    with contextlib.ExitStack() as replaced:
        for stream, replace in ((sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)):
            if stream is None:  # a closed descriptor
                replaced.enter_context(replace(replaced.enter_context(open(os.devnull, "w"))))
        if _is_original(sys.stdout, sys.__stdout__):
            replaced.enter_context(contextlib.redirect_stdout(_text(_Stdout, sys.stdout)))
        replaced.enter_context(lenient_stderr())
        yield


@contextlib.contextmanager
def lenient_stderr() -> Iterator[None]:
    """Inside, no write to stderr fails. A replaced stderr (a notebook's, a test's) is left alone."""
    if _is_original(sys.stderr, sys.__stderr__):
        with contextlib.redirect_stderr(_text(_Stderr, sys.stderr)):
            yield
    else:
        yield


def _fill_closed_descriptors() -> None:
    """Otherwise the next opened file, perhaps a checkpoint, would get the descriptor of stdout or stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
            os.set_inheritable(null, True)


def _is_original(stream: TextIO | None, original: TextIO | None) -> bool:
    return os.name == "posix" and stream is original and isinstance(stream, io.TextIOWrapper)


def _text(raw: type[io.FileIO], like: TextIO) -> io.TextIOWrapper:
    """A text stream like `like`, on the same descriptor, but written by `raw`."""
    assert isinstance(like, io.TextIOWrapper)
    file = raw(like.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        file if like.write_through else io.BufferedWriter(file),  # with PYTHONUNBUFFERED there is no buffer
        like.encoding,
        like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


class _Stderr(io.FileIO):
    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            _write_all(self.fileno(), data, PATIENCE_S)
        return len(memoryview(data))


class _Stdout(io.FileIO):
    lost = False

    def write(self, data: Any, /) -> int:
        if not self.lost:
            try:
                _write_all(self.fileno(), data, None)
            except OSError as error:
                self.lost = True  # what is still buffered is dropped at exit
                if error.errno in (errno.EPIPE, errno.EIO):
                    raise ReaderGone from None
                raise UserError(
                    f"stdout cannot be written ({error.strerror}); what was saved is intact; send the output elsewhere"
                ) from None
        return len(memoryview(data))


def _write_all(descriptor: int, data: Any, patience: float | None) -> None:
    left = memoryview(data)
    while left:
        _, ready, _ = select.select([], [descriptor], [], patience)
        if not ready:
            raise TimeoutError
        with contextlib.suppress(BlockingIOError):  # another writer was faster
            left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]  # this much never blocks
