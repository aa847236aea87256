"""Files that appear whole or not at all, and manifests that tell whether they are still what was written.

Everything a run keeps is written by these. No torch: tensors come and go as numpy arrays.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokendepth.errors import UserError

MANIFEST = "MANIFEST.json"
MANIFEST_VERSION = 1
"""Of manifests and of what they seal; configs have one of their own."""

Tensors = dict[str, Any]


class NewerFormat(UserError):
    """Not damaged, so not to be passed over: a later version of tokendepth wrote it."""


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn what a disk does to a user into one line."""
    again = "repeat the command (a training with --resume)"
    remedies = {
        errno.ENOSPC: f"no space is left on the disk; what was saved is intact; free some and {again}",
        errno.EDQUOT: f"the disk quota is used up; what was saved is intact; free some and {again}",
        errno.EROFS: f"the file system is read-only; what was saved is intact; {again}, or choose another folder",
        errno.EACCES: f"permission denied; what was saved is intact; allow it and {again}, or choose another folder",
        errno.EPERM: f"permission denied; what was saved is intact; allow it and {again}, or choose another folder",
        errno.ENOTDIR: "a part of this path is a file, not a folder; choose another",
        errno.EEXIST: "a file of that name is in the way; choose another name",
    }
    try:
        yield
    except OSError as error:
        remedy = remedies.get(error.errno or 0, f"{error.strerror or error}; choose another folder")
        raise UserError(f"cannot write {path}: {remedy}") from error


def sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows opens no folders, and keeps their entries itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace `path` atomically: a crash or a full disk leaves the old content. An OSError is the caller's to tell."""
    part = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    with disk_faults(path):
        replace_bytes(path, data)


def json_bytes(tree: object) -> bytes:
    return (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode()


def write_json(path: Path, tree: object) -> None:
    write_bytes(path, json_bytes(tree))


def read_json(path: Path, remedy: str = "restore it from a copy") -> Any:
    try:
        return _parsed(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None


def _parsed(path: Path) -> Any:
    """The problem alone: what can be done about it depends on whose file it is."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({str(error)[:80]})") from None


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_bytes(step: int, files: dict[str, dict[str, Any]]) -> bytes:
    """A manifest is its own checksum too, so that no byte of a checkpoint can change unnoticed."""
    body = {"version": MANIFEST_VERSION, "step": step, "files": files}
    return json_bytes({**body, "sha256": _seal(body)})


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _is_sealed(manifest: dict[str, Any]) -> bool:
    """By whatever version wrote it; else a flipped bit could pass for a newer one."""
    return manifest.get("sha256") == _seal({key: value for key, value in manifest.items() if key != "sha256"})


def _measure(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, names: tuple[str, ...], step: int) -> None:
    """Written last. An OSError is the caller's to tell."""
    replace_bytes(folder / MANIFEST, _manifest_bytes(step, {name: _measure(folder / name) for name in names}))


def read_manifest(folder: Path) -> tuple[int, dict[str, Any]]:
    """The step and the files' facts, if the manifest is to the byte what tokendepth wrote."""
    path = folder / MANIFEST
    manifest: Any = _parsed(path)
    manifest = manifest if isinstance(manifest, dict) else {}
    version, step, files = (manifest.get(key) for key in ("version", "step", "files"))
    if type(version) is int and version > MANIFEST_VERSION and _is_sealed(manifest):
        raise NewerFormat(f"{path} has format {version}, newer than {MANIFEST_VERSION}; upgrade tokendepth")
    well_formed = type(step) is int and step >= 0 and isinstance(files, dict)
    if not well_formed or path.read_bytes() != _manifest_bytes(step, files):
        raise UserError(f"{path} is damaged: it is not what tokendepth wrote")
    return step, files


def verify_manifest(folder: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> int:
    """The step that `folder` holds, if every file in it is as it was written; else a UserError that names the file."""
    step, files = read_manifest(folder)
    if not set(names) <= set(files) <= {*names, *optional}:
        raise UserError(f"{folder / MANIFEST} is damaged: it does not list what it must")
    for name, facts in files.items():
        verify_file(folder / name, facts)
    return step


def verify_file(path: Path, expected: Any) -> None:
    try:
        found = _measure(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if found != expected:
        same_size = isinstance(expected, dict) and expected.get("bytes") == found["bytes"]
        raise UserError(f"{path} is damaged: its {'SHA-256' if same_size else 'size'} is wrong")


def serialize(tensors: Tensors) -> bytes:
    """The same tensors make the same bytes: of several metadata entries the order would be left to chance."""
    from safetensors.numpy import save

    return save(tensors, metadata={"tokendepth": str(MANIFEST_VERSION)})


def deserialize(path: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(path.read_bytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a checkpoint of tokendepth ({str(error)[:80]})") from None
