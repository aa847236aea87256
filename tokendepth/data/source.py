"""The bytes of a corpus, read in pieces as often as needed, so that no text has to fit into memory."""

import codecs
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, TypeVar

from tokendepth.errors import UserError

PIECE = 1 << 20
"""Bytes read at a time."""

BAR_FROM = 20_000_000
"""Reading a corpus of at least this many bytes shows a progress bar; it takes a slow machine seconds."""

Text = TypeVar("Text", str, bytes)


@dataclass(frozen=True)
class Source:
    name: str
    """The corpus as the user named it."""
    size: int
    """In bytes; for progress bars."""
    pieces: Callable[[], Generator[bytes, None, None]]
    """Starts from the beginning at each call. A read error is a UserError."""

    @classmethod
    def of_bytes(cls, name: str, content: bytes) -> "Source":
        def pieces() -> Generator[bytes, None, None]:
            yield from (content[first : first + PIECE] for first in range(0, len(content), PIECE))

        return cls(name, len(content), pieces)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        with reading(self, f"reading {self.name}") as pieces:
            for piece in pieces:
                digest.update(piece)
        return digest.hexdigest()

    def expecting(self, sha256: str) -> "Source":
        """The same source, but raising at the end of a pass if its bytes do not have this SHA-256 any more."""

        def pieces() -> Generator[bytes, None, None]:
            digest = hashlib.sha256()
            with contextlib.closing(self.pieces()) as found:
                for piece in found:
                    digest.update(piece)
                    yield piece
            if digest.hexdigest() != sha256:
                raise UserError(
                    f"data.corpus {self.name!r} changed while it was being read; repeat the command once it is complete"
                )

        return Source(self.name, self.size, pieces)


def read_pieces(file: IO[bytes], most: int) -> Iterator[bytes]:
    """At most `most` bytes of an open file."""
    while most and (piece := file.read(min(most, PIECE))):
        most -= len(piece)
        yield piece


@contextlib.contextmanager
def reading(
    source: Source, doing: str, *, most: int | None = None, bar_from: int = BAR_FROM
) -> Iterator[Iterator[bytes]]:
    """One pass over a source, with a progress bar for `bar_from` bytes or more; at most `most` bytes will be read.

    At the end of the block the file is closed and the bar is removed, so that it does not mix with messages.
    """
    size = source.size if most is None else min(most, source.size)
    with contextlib.ExitStack() as stack:
        pieces: Iterator[bytes] = stack.enter_context(contextlib.closing(source.pieces()))
        if size >= bar_from:
            pieces = stack.enter_context(_bar(pieces, size, doing))
        yield pieces


@contextlib.contextmanager
def _bar(pieces: Iterator[bytes], size: int, doing: str) -> Iterator[Iterator[bytes]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(escape(doing), total=size)

        def counted() -> Iterator[bytes]:
            for piece in pieces:
                yield piece
                progress.advance(task, len(piece))

        yield counted()


def texts(pieces: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode UTF-8 piece by piece; a UserError names the first invalid byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = iter(pieces)
    place = 0  # of the first byte that is not decoded yet
    for piece, last in itertools.chain(((piece, False) for piece in pieces), [(b"", True)]):
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(piece, last)
        except UnicodeDecodeError as error:
            for _ in pieces:  # a source that is not the expected one raises at its end, a better explanation
                pass
            raise UserError(
                f"data.corpus {name!r} is not UTF-8: byte {place + error.start} is {error.object[error.start]:#04x}; "
                "save it as UTF-8, or read it as bytes with --data.tokens byte"
            ) from None
        place += waiting + len(piece) - len(decoder.getstate()[0])
        if text:
            yield text


def cut(pieces: Iterable[Text], ends: tuple[int, ...]) -> Iterator[tuple[int, Text]]:
    """The pieces, each with the number of its split; a piece in which a split ends is cut there."""
    place = 0
    for piece in pieces:
        inside = [min(max(end - place, 0), len(piece)) for end in ends]
        for split, (first, end) in enumerate(itertools.pairwise((0, *inside, len(piece)))):
            if first < end:
                yield split, piece[first:end]
        place += len(piece)
