"""The cache folder: atomically written files, and the tokens of corpora, kept between runs.

A corpus is two files. The ids (`.npy`) are written first, as they come, and last the index (`.json`), which holds their
SHA-256. So an interrupted write leaves nothing that could be taken for tokens, and a damaged file is detected and
rebuilt. Nothing is synced to the disk, since the checksums detect files cut short by a crash. Ids are memory-mapped.
"""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokendepth.data.build import TokenStream
from tokendepth.data.dataset import SPLITS
from tokendepth.data.text import TextDataset, check_length
from tokendepth.data.tokenizer import tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.runs.files import read_bytes, sha256

CACHE_VERSION = 1
LEFT_OVER_AFTER_S = 24 * 3600
MOST_IN_MEMORY = 4_000_000_000  # bytes of ids


def cache_folder() -> Path:
    try:
        if own := os.environ.get("TOKENDEPTH_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tokendepth"
    except RuntimeError as error:  # what expanduser raises
        raise UserError(f"no cache folder ({error}); set TOKENDEPTH_CACHE to a full path") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` once it is complete. Safe for concurrent processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_overs(path)
    part = path.with_name(f".tmp-{uuid.uuid4().hex}-{path.name}")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _remove_left_overs(path: Path) -> None:
    """Delete unfinished files of killed processes; recent ones may belong to a process that is still writing."""
    for part in path.parent.glob(f".tmp-*-{path.name}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > LEFT_OVER_AFTER_S:
                part.unlink()


def load_tokens(key: str, name: str) -> TextDataset | None:
    """The corpus cached under `key`, with memory-mapped ids; None if it is missing or damaged."""
    ids_path, index_path = _paths(key)
    try:
        stored = read_bytes(index_path)
    except OSError:
        return None  # missing, or unreadable, which `keep_tokens` reports
    try:
        index = _opened(json.loads(stored))
        if index["version"] != CACHE_VERSION:
            return None
        tokenizer, ends = tokenizer_from_dict(index["tokenizer"]), tuple(index["ends"])
        header = _npy_header(tokenizer.dtype, ends[-1])
        # The size first, since hashing an endless file would never finish.
        if os.stat(ids_path).st_size != len(header) + ends[-1] * tokenizer.dtype.itemsize:
            raise ValueError("wrong size of the ids")
        # Hashed in pieces rather than through the map, whose pages would count as this process's memory.
        if index["key"] != key or sha256(ids_path) != index["ids_sha256"]:
            raise ValueError("wrong SHA-256 of the ids")
        return TextDataset(
            name=name,
            fingerprint=index["fingerprint"],
            tokenizer=tokenizer,
            ids=np.load(ids_path, mmap_mode="r", allow_pickle=False),
            ends=ends,
            split_bytes=tuple(index["split_bytes"]),
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        _say(f"the cached tokens {ids_path} are damaged ({_reason(error)}); building them again")
        return None


def keep_tokens(key: str, stream: TokenStream) -> TextDataset:
    """Write the ids to the cache. If that fails, a line on stderr reports it and the ids stay in memory."""
    ids_path, index_path = _paths(key)
    try:
        with replacing(ids_path) as file:
            ends, split_bytes = _write_ids(file, stream)
            file.flush()
            digest = sha256(Path(file.name))
        index = {
            "version": CACHE_VERSION,
            "key": key,
            "fingerprint": stream.fingerprint,
            "ids_sha256": digest,
            "tokenizer": stream.tokenizer.to_dict(),
            "ends": ends,
            "split_bytes": split_bytes,
        }
        with replacing(index_path) as file:
            file.write(json.dumps(_sealed(index)).encode())
        ids = np.load(ids_path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        _say(
            f"cannot keep the tokens of {stream.name!r} in {ids_path.parent} ({_reason(error)}); they stay in memory; "
            "set TOKENDEPTH_CACHE to a folder with space that can be written"
        )
        return in_memory(stream)
    return TextDataset(stream.name, stream.fingerprint, stream.tokenizer, ids, ends, split_bytes)


def in_memory(stream: TokenStream) -> TextDataset:
    held = bytearray()

    def hold(ids: np.ndarray) -> None:
        held.extend(ids.data.cast("B"))
        if len(held) > MOST_IN_MEMORY:
            raise UserError(
                f"the tokens of {stream.name!r} take more than {MOST_IN_MEMORY // 10**9} GB, too much to stay in "
                "memory; set TOKENDEPTH_CACHE to a folder with space that can be written"
            )

    ends, split_bytes = _drain(stream, hold)
    ids = np.frombuffer(held, stream.tokenizer.dtype)
    return TextDataset(stream.name, stream.fingerprint, stream.tokenizer, ids, ends, split_bytes)


def _write_ids(file: IO[bytes], stream: TokenStream) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Like np.save, but piece by piece."""
    dtype = stream.tokenizer.dtype
    if shutil.disk_usage(Path(file.name).parent).free < (stream.tokens or 0) * dtype.itemsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    start = _npy_header(dtype, 0)
    file.write(start)
    ends, split_bytes = _drain(stream, lambda ids: file.write(ids.data))
    header = _npy_header(dtype, ends[-1])
    assert len(header) == len(start), "NumPy leaves room for a longer first axis"
    file.seek(0)
    file.write(header)
    return ends, split_bytes


def _npy_header(dtype: np.dtype, count: int) -> bytes:
    file = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, facts)
    return file.getvalue()


def _drain(stream: TokenStream, take: Callable[[np.ndarray], object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pass all ids to `take`; return where the splits end and how many bytes of text each has."""
    tokens, split_bytes = [0] * len(SPLITS), [0] * len(SPLITS)
    with contextlib.closing(stream.pieces()) as pieces:
        for split, ids, size in pieces:
            assert ids.dtype == stream.tokenizer.dtype
            take(ids)
            tokens[split] += len(ids)
            split_bytes[split] += size
    check_length(stream.name, tokens)
    return tuple(itertools.accumulate(tokens)), tuple(split_bytes)


def _paths(key: str) -> tuple[Path, Path]:
    folder = cache_folder() / "tokens"
    return folder / f"{key}.npy", folder / f"{key}.json"


def _sealed(index: dict[str, Any]) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest(), "index": index}


def _opened(tree: Any) -> dict[str, Any]:
    if tree != _sealed(tree["index"]):
        raise ValueError("wrong SHA-256 of the index")
    return tree["index"]


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)[:80]


def _say(line: str) -> None:
    print(f"tokendepth: {line}", file=sys.stderr)
