"""Atomic files, and checksums ("seals") that detect changes.

All files of a run are written and removed by these functions, so the order is the same everywhere: content is synced
before the file gets its name, and a name before anything that relies on it. A power cut loses only unsynced data.

Only regular files of bounded size are read: a pipe, a device or an endless file in their place is rejected at once. No
torch here: tensors are numpy arrays.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from tokendepth.errors import UserError
from tokendepth.runs import shapes
from tokendepth.runs.shapes import problem

MANIFEST = "MANIFEST.json"
MANIFEST_VERSION = 2
"""Version of manifests and of the files they seal; configs have their own. Since version 2, files added to a finished
run are sealed and checkpoints no longer hold metrics.jsonl. Earlier versions can still be read."""
LARGEST_JSON = 4 * 10**8
"""Bytes; the tokenizer of a run may take half of that."""
PIECE = 1 << 20
"""Bytes read at a time."""

Tensors = dict[str, Any]
Facts = dict[str, Any]
"""`bytes` and `sha256` of a file."""


class NewerFormat(UserError):
    """The file is from a later version of tokendepth: it is not damaged, so it must not be skipped."""


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn disk errors into one-line errors with a remedy."""
    again = "repeat the command (a training with --resume)"
    remedies = {
        errno.ENOSPC: f"no space is left on the disk; what was saved is intact; free some and {again}",
        errno.EDQUOT: f"the disk quota is used up; what was saved is intact; free some and {again}",
        errno.EROFS: f"the file system is read-only; what was saved is intact; {again}, or choose another folder",
        errno.EACCES: f"permission denied; what was saved is intact; allow it and {again}, or choose another folder",
        errno.EPERM: f"permission denied; what was saved is intact; allow it and {again}, or choose another folder",
        errno.ENOTDIR: "a part of this path is a file, not a folder; choose another",
        errno.EEXIST: "a file of that name is in the way; choose another name, or move it away",
        errno.EISDIR: f"a folder is in the place of a file; move it away and {again}",
    }
    try:
        yield
    except OSError as error:
        remedy = remedies.get(error.errno or 0, f"{error.strerror or error}; choose another folder")
        raise UserError(f"cannot write {path}: {remedy}") from error


# --- reading ----------------------------------------------------------------------------------------------------------


def regular(path: str, flags: int) -> int:
    """An opener for `open` that rejects pipes and devices, from which reading might never end."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return handle


def open_regular(path: Path) -> BufferedReader:
    return open(path, "rb", opener=regular)


def read_bytes(path: Path, most: int | None = LARGEST_JSON) -> bytes:
    """The caller handles OSErrors, including the one for a file of more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes are too many for it")
        return file.read(size)


def first_bytes(path: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes, in pieces; fewer if the file is shorter."""
    with open_regular(path) as file:
        while size and (piece := file.read(min(size, PIECE))):
            size -= len(piece)
            yield piece


def read_json(path: Path, remedy: str = "restore it from a copy") -> Any:
    try:
        return _parsed(path, _content(path))
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None


def _content(path: Path) -> bytes:
    """The UserError names only the problem, since the remedy depends on what file it is."""
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(path: Path, content: bytes) -> Any:
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({str(error)[:80]})") from None


def parse_json(content: bytes) -> Any:
    """Rejects NaN and infinities, which we never write. The caller handles ValueError and RecursionError."""
    return json.loads(content, parse_float=_finite, parse_constant=_finite)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is not a finite number")
    return number


# --- writing ----------------------------------------------------------------------------------------------------------


def sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders, and keeps their entries safe itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, synced: otherwise a power cut could lose the folder and everything in it."""
    if not path.is_dir():
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # the parent may be writable but not readable
            sync_folder(path.parent)


def replace_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace `path` atomically: a crash or a full disk leaves the old content. The caller handles OSErrors."""
    part = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        part.unlink(missing_ok=True)  # left over from an earlier process with the same id
        with open(part, "xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def replace_bytes(path: Path, data: bytes) -> None:
    replace_pieces(path, [data])


def write_bytes(path: Path, data: bytes) -> None:
    with disk_faults(path):
        replace_bytes(path, data)


def json_bytes(tree: object) -> bytes:
    return (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode()


def write_json(path: Path, tree: object) -> None:
    write_bytes(path, json_bytes(tree))


def append(path: Path, data: bytes, *, sync: bool = False) -> None:
    """The caller handles OSErrors."""
    _keep_to_ourselves(path)
    with open(path, "ab", opener=regular) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def cut(path: Path, size: int) -> None:
    """Truncate to at most `size` bytes. The caller handles OSErrors."""
    _keep_to_ourselves(path)
    if os.lstat(path).st_size > size:
        os.truncate(path, size)


def _keep_to_ourselves(path: Path) -> None:
    """Replace a link, or a file with more than one hard link, by a copy: the original may belong to someone else."""
    with contextlib.suppress(FileNotFoundError):
        facts = os.lstat(path)
        if stat.S_ISLNK(facts.st_mode) or facts.st_nlink > 1:
            replace_pieces(path, first_bytes(path, os.stat(path).st_size))


def rename(path: Path, target: Path) -> None:
    """The caller handles OSErrors."""
    os.rename(path, target)
    sync_folder(target.parent)


def put_aside(path: Path) -> Path:
    """Rename whatever is at `path`, so that its owner can find it. The caller handles OSErrors."""
    names = (path.with_name(f"{path.name}.aside{number or ''}") for number in itertools.count())
    target = next(name for name in names if not os.path.lexists(name))
    rename(path, target)
    return target


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove these files from a folder, and the folder if nothing else is in it. Files that cannot be removed stay."""
    if not folder.is_symlink():
        for path in (folder / name for name in names):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def left_overs(folder: Path, names: str) -> list[Path]:
    """Unfinished files of killed processes: .tmp-NAME-PROCESS, with a NAME that matches the pattern `names`."""
    return [path for path in folder.glob(".tmp-*") if re.fullmatch(rf"\.tmp-({names})-\d+", path.name)]


def remove_left_overs(folder: Path, names: str) -> None:
    for path in left_overs(folder, names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


# --- sealed files -----------------------------------------------------------------------------------------------------


def sealed(body: dict[str, Any]) -> bytes:
    """JSON that includes its own checksum, so that every change is detected."""
    return json_bytes({**body, "sha256": _seal(body)})


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, body: dict[str, Any]) -> None:
    write_bytes(path, sealed(body))


def read_sealed(path: Path, version: int) -> tuple[dict[str, Any], bool]:
    """The content of a file written by `write_sealed`, checked, of at most this `version`; and whether it is sealed.

    Version 1 of eval.json and calibration.json had no seal. Every later version has one, so a file that has lost its
    seal is not taken for an old one. The UserError names only the problem.
    """
    content = _content(path)
    tree = _parsed(path, content)
    found = tree.get("version") if isinstance(tree, dict) else None
    if type(found) is not int:
        raise UserError(f"{path} is damaged: it is not what tokendepth wrote")
    body = {key: value for key, value in tree.items() if key != "sha256"}
    if found > version and tree.get("sha256") == _seal(body):
        raise NewerFormat(f"{path} has format {found}, newer than {version}; upgrade tokendepth")
    if found == 1 and "sha256" not in tree:
        return body, False
    if found > version or content != sealed(body):
        raise UserError(f"{path} is damaged: it is not what tokendepth wrote")
    return body, True


# --- manifests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    version: int
    step: int
    files: dict[str, Facts]


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, names: Iterable[str], step: int) -> None:
    """Must be written last, since it guarantees that these files are on the disk. The caller handles OSErrors."""
    files = {name: _synced_facts(folder / name) for name in names}
    replace_bytes(folder / MANIFEST, sealed({"version": MANIFEST_VERSION, "step": step, "files": files}))


def _synced_facts(path: Path) -> Facts:
    with open(path, "r+b" if os.name == "nt" else "rb", opener=regular) as file:  # Windows syncs only writable files
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path) -> Manifest:
    """The manifest; a UserError if it is not exactly what tokendepth wrote."""
    path = folder / MANIFEST
    body, is_sealed = read_sealed(path, MANIFEST_VERSION)
    if not is_sealed or problem(body, shapes.MANIFEST):
        raise UserError(f"{path} is damaged: it is not what tokendepth wrote")
    return Manifest(**body)


def verify_manifest(folder: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> Manifest:
    """The manifest, if every file that it lists is unchanged; else a UserError that names the file."""
    manifest = read_manifest(folder)
    if not set(names) <= set(manifest.files) <= {*names, *optional}:
        raise UserError(f"{folder / MANIFEST} is damaged: it does not list what it must")
    for name, facts in manifest.files.items():
        verify_file(folder / name, facts)
    return manifest


def verify_file(path: Path, expected: Facts) -> None:
    try:
        with open_regular(path) as file:
            # The size first, since hashing an endless file would never finish.
            same_size = os.fstat(file.fileno()).st_size == expected["bytes"]
            if same_size and hashlib.file_digest(file, "sha256").hexdigest() == expected["sha256"]:
                return
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    raise UserError(f"{path} is damaged: its {'SHA-256' if same_size else 'size'} is wrong")


# --- tensors ----------------------------------------------------------------------------------------------------------


def serialize(tensors: Tensors) -> bytes:
    """Deterministic. There is only one metadata entry, because the order of several would be random."""
    from safetensors.numpy import save

    return save(tensors, metadata={"tokendepth": "1"})


def deserialize(path: Path) -> Tensors:
    """The tensors of a file that has been verified."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(read_bytes(path, most=None))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a checkpoint of tokendepth ({str(error)[:80]})") from None
    return tensors
