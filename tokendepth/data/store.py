"""The cache folder: files that appear whole, and the tokens of a corpus kept between runs.

A corpus is two files. The ids (`.npy`) are written first and the index (`.json`), which holds their SHA-256, last; so
an interrupted write leaves nothing that would be taken for tokens, and a damaged file is noticed and rebuilt. Nothing
is synced to the disk: what a crash cuts short, the checksums find.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokendepth.data.text import TextDataset
from tokendepth.data.tokenizer import tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.files import sha256

CACHE_VERSION = 1
LEFT_OVER_AFTER_S = 24 * 3600


def cache_folder() -> Path:
    try:
        if own := os.environ.get("TOKENDEPTH_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tokendepth"
    except RuntimeError as error:  # what expanduser raises
        raise UserError(f"no cache folder ({error}); set TOKENDEPTH_CACHE to a full path") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` once it is whole. Any number of processes may do so at once."""
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
    """Delete what killed processes left of `path`. What is young may belong to a process at work."""
    for part in path.parent.glob(f".tmp-*-{path.name}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > LEFT_OVER_AFTER_S:
                part.unlink()


def load_tokens(key: str, name: str) -> TextDataset | None:
    """The corpus kept under `key`, its ids memory-mapped; None where there is none, or none that is whole."""
    ids_path, index_path = _paths(key)
    try:
        stored = index_path.read_bytes()
    except OSError:
        return None  # not there, or out of reach: then `save_tokens` says so
    try:
        index = _opened(json.loads(stored))
        if index["version"] != CACHE_VERSION:
            return None
        # Read in pieces rather than through the map, whose pages would count as this process's memory.
        if index["key"] != key or sha256(ids_path) != index["ids_sha256"]:
            raise ValueError("wrong SHA-256 of the ids")
        return TextDataset(
            name=name,
            fingerprint=index["fingerprint"],
            tokenizer=tokenizer_from_dict(index["tokenizer"]),
            ids=np.load(ids_path, mmap_mode="r", allow_pickle=False),
            ends=tuple(index["ends"]),
            split_bytes=tuple(index["split_bytes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _say(f"the cached tokens {ids_path} are damaged ({_reason(error)}); building them again")
        return None


def save_tokens(key: str, dataset: TextDataset) -> None:
    """Keep `dataset` for the next time. A cache that cannot be written costs one line, not the run."""
    ids_path, index_path = _paths(key)
    try:
        with replacing(ids_path) as file:
            np.save(file, dataset.ids, allow_pickle=False)
            file.flush()
            digest = sha256(Path(file.name))
        index = {
            "version": CACHE_VERSION,
            "key": key,
            "fingerprint": dataset.fingerprint,
            "ids_sha256": digest,
            "tokenizer": dataset.tokenizer.to_dict(),
            "ends": dataset.ends,
            "split_bytes": dataset.split_bytes,
        }
        with replacing(index_path) as file:
            file.write(json.dumps(_sealed(index)).encode())
    except OSError as error:
        _say(
            f"cannot keep the tokens of {dataset.name!r} in {ids_path.parent} ({_reason(error)}); they stay in memory; "
            "set TOKENDEPTH_CACHE to a folder with space that can be written"
        )


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
