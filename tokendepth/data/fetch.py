"""Published corpora, from a local copy or downloaded; both are checked by the SHA-256 of the uncompressed content."""

import contextlib
import functools
import hashlib
import http.client
import lzma
import os
import urllib.request
import zipfile
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from tokendepth.data.source import Source, read_pieces
from tokendepth.data.store import cache_folder, replacing
from tokendepth.errors import UserError

TIMEOUT_S = 20
CHUNK = 1 << 18


@dataclass(frozen=True)
class Published:
    name: str
    address: str
    sha256: str
    """Of the uncompressed content; so is `size`."""
    size: int
    file_names: tuple[str, ...]
    """File names to look for locally; the first is the name of the download."""
    char_vocabulary: int
    bpe_vocabulary: int
    """bpe:N has exactly N tokens up to this N; beyond it the text may not have enough pairs."""
    train_and_val: tuple[int, int] | None = None
    """Where the train and val splits end, in bytes if those are the tokens, else in characters; by default 80% and 90%
    of the text."""


PUBLISHED = {
    "shakespeare": Published(
        name="shakespeare",
        address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        size=1_115_394,
        file_names=("tinyshakespeare.txt",),
        char_vocabulary=65,
        bpe_vocabulary=8192,
    ),
    "enwik8": Published(
        name="enwik8",
        address="https://mattmahoney.net/dc/enwik8.zip",
        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        size=100_000_000,
        file_names=("enwik8.zip", "enwik8.xz", "enwik8"),
        char_vocabulary=6064,
        bpe_vocabulary=65_536,
        train_and_val=(90_000_000, 95_000_000),
    ),
}


def fetch(corpus: Published) -> Source:
    """The content, from the folder TOKENDEPTH_DATA, the cache folder or the network, in this order."""
    for folder in filter(None, (_own_folder(), cache_folder())):
        for path in (folder / name for name in corpus.file_names):
            if os.path.isfile(path):  # unlike Path.is_file, never raises
                return _copy(corpus, path)
            if os.path.lexists(path) and not os.path.isdir(path):  # a dangling link, or a pipe
                raise UserError(f"{path} is not a regular file; delete it or replace it by {corpus.name}")
    path = cache_folder() / corpus.file_names[0]
    _download(corpus, path)
    return _copy(corpus, path)


def _copy(corpus: Published, path: Path) -> Source:
    pieces = functools.partial(_content, corpus, path, said=str(path), remedy="delete it or replace it")
    return Source(corpus.name, corpus.size, pieces)


def _own_folder() -> Path | None:
    return Path(os.path.expanduser(own)) if (own := os.environ.get("TOKENDEPTH_DATA")) else None


def _download(corpus: Published, path: Path) -> None:
    try:
        # Closed here, so that the progress bar is removed before any message.
        with replacing(path) as file, contextlib.closing(_from_network(corpus)) as chunks:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            for _ in _content(corpus, Path(file.name), said=corpus.address, remedy="download it again"):
                pass
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; "
            "set TOKENDEPTH_CACHE to a folder with space that can be written"
        ) from error


def _from_network(corpus: Published) -> Generator[bytes, None, None]:
    from rich.console import Console
    from rich.progress import wrap_file

    request = urllib.request.Request(corpus.address, headers={"User-Agent": "tokendepth"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            left = corpus.size  # a longer response is not the corpus
            description = f"downloading {corpus.name}"
            with wrap_file(
                response, total=response.length or left, description=description, console=Console(stderr=True)
            ) as stream:
                while left >= 0 and (chunk := stream.read(CHUNK)):
                    left -= len(chunk)
                    yield chunk
    except (OSError, http.client.HTTPException) as error:
        own = _own_folder()
        looked = f" (TOKENDEPTH_DATA is {own}, which has no {' or '.join(corpus.file_names)})" if own else ""
        raise UserError(
            f"{corpus.name} is not on this machine{looked} and cannot be downloaded from "
            f"{urlsplit(corpus.address).netloc} ({error}); put {corpus.file_names[0]} into a folder and set "
            "TOKENDEPTH_DATA to that folder"
        ) from error


def _content(corpus: Published, path: Path, *, said: str, remedy: str) -> Generator[bytes, None, None]:
    """The uncompressed content in pieces; raises at the end if it is not the corpus."""
    digest = hashlib.sha256()
    try:
        with contextlib.closing(_uncompressed(corpus, path)) as file:
            for piece in read_pieces(file, corpus.size + 1):  # one byte too many shows that it is not the corpus
                digest.update(piece)
                yield piece
    except OSError as error:
        raise UserError(f"cannot read {said}: {error.strerror or error}; {remedy}") from error
    except (lzma.LZMAError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        raise UserError(f"{said} is damaged ({error!s:.80}); {remedy}") from error
    found = digest.hexdigest()
    if found != corpus.sha256:
        raise UserError(
            f"{said} is not {corpus.name}: its SHA-256 begins {found[:12]}, expected {corpus.sha256[:12]}; {remedy}"
        )


def _uncompressed(corpus: Published, path: Path) -> IO[bytes]:
    if path.suffix in (".xz", ".zip") and os.stat(path).st_size > corpus.size:  # xz accepts endless padding
        raise EOFError(f"{os.stat(path).st_size:,} bytes, more than uncompressed")
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:  # its file stays open while a member is open
            return archive.open(corpus.name)
    return open(path, "rb")
