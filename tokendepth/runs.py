"""Run: one training run on disk, the only place where training, evaluation, report and export meet.

    config.json  env.json  tokenizer.json  metrics.jsonl  checkpoints/
    model.safetensors  MANIFEST.json       once finished
    eval.json                              once evaluated

A checkpoint is a folder that appears whole or not at all: it is written under another name, synced, closed by a
manifest with the SHA-256 of every file, and renamed. Loading takes the newest one whose manifest verifies and names
those it passed over. No file is ever a pickle. Imports no torch: tensors come and go as numpy arrays.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendepth.config import FORMAT_VERSION, RunConfig, from_dict, to_dict
from tokendepth.errors import UserError

KEEP_CHECKPOINTS = 2
MANIFEST = "MANIFEST.json"
CHECKPOINT_FILES = ("state.safetensors",)
MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")

Tensors = dict[str, Any]


# --- files that appear whole or not at all ----------------------------------------------------------------------------


@contextlib.contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn what a disk does to a user into one line."""
    remedies = {
        errno.ENOSPC: "no space is left on the disk; free some and repeat the command (a training with --resume)",
        errno.EDQUOT: "the disk quota is used up; free some and repeat the command (a training with --resume)",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.EACCES: "permission denied; choose another folder or change the permissions",
        errno.EPERM: "permission denied; choose another folder or change the permissions",
        errno.ENOTDIR: "a part of this path is a file, not a folder; choose another",
        errno.EEXIST: "a file of that name is in the way; choose another name",
    }
    try:
        yield
    except OSError as error:
        remedy = remedies.get(error.errno or 0, f"{error.strerror or error}; choose another folder")
        raise UserError(f"cannot write {path}: {remedy}") from error


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows opens no folders, and keeps their entries itself
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` atomically: a crash or a full disk leaves the old content."""
    part = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with disk_faults(path):
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_json(path: Path, tree: object) -> None:
    write_bytes(path, (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; is {path.parent} a tokendepth run?") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check the file and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({str(error)[:80]}); restore it from a copy") from None


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_bytes(step: int, files: dict[str, dict[str, Any]]) -> bytes:
    """A manifest is its own checksum too, so that no byte of a checkpoint can change unnoticed."""
    body = {"version": FORMAT_VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=2) + "\n").encode()


def _measure(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, names: tuple[str, ...], step: int) -> None:
    write_bytes(folder / MANIFEST, _manifest_bytes(step, {name: _measure(folder / name) for name in names}))


def verify_manifest(folder: Path, names: tuple[str, ...]) -> int:
    """The step that `folder` holds, if every file in it is as it was written; else a UserError that names the file."""
    path = folder / MANIFEST
    manifest: Any = read_json(path)
    manifest = manifest if isinstance(manifest, dict) else {}
    version, step, files = (manifest.get(key) for key in ("version", "step", "files"))
    if type(version) is int and version > FORMAT_VERSION:
        raise UserError(f"{path} has format {version}, newer than {FORMAT_VERSION}; upgrade tokendepth")
    well_formed = type(step) is int and step >= 0 and isinstance(files, dict) and set(files) == set(names)
    if not well_formed or path.read_bytes() != _manifest_bytes(step, files):
        raise UserError(f"{path} is damaged: it is not what tokendepth wrote")
    for name in names:
        try:
            found = _measure(folder / name)
        except FileNotFoundError:
            raise UserError(f"{folder / name} is missing") from None
        except OSError as error:
            raise UserError(f"{folder / name} cannot be read: {error.strerror}") from None
        expected = files[name]
        if found != expected:
            same_size = isinstance(expected, dict) and expected.get("bytes") == found["bytes"]
            what = "SHA-256" if same_size else "size"
            raise UserError(f"{folder / name} is damaged: its {what} is wrong")
    return step


def _serialize(tensors: Tensors) -> bytes:
    """The same tensors make the same bytes: of several metadata entries the order would be left to chance."""
    from safetensors.numpy import save

    return save(tensors, metadata={"tokendepth": str(FORMAT_VERSION)})


def _deserialize(path: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(path.read_bytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a checkpoint of tokendepth ({str(error)[:80]})") from None


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: Tensors


@dataclass(frozen=True)
class Run:
    path: Path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """An existing run; a UserError where there is none."""
        run = cls(Path(path))
        if run.path.is_file():
            raise UserError(f"{run.path} is a file; expected a run folder; name the folder")
        if not run.path.is_dir():
            raise UserError(f"{run.path}: no such run folder; train one with tokendepth train RECIPE --out {run.path}")
        if not (run.path / "config.json").is_file():
            inside = sorted(str(config.parent) for config in run.path.glob("*/config.json"))
            remedy = f"it holds runs: {', '.join(inside[:3])}" if inside else "name a folder that is one"
            raise UserError(f"{run.path} is not a tokendepth run: it has no config.json; {remedy}")
        return run

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, *, resume: bool) -> "Run":
        """The run folder for `config`: new, or with `resume` the one that is there if it is of the same config."""
        run = cls(Path(path))
        with disk_faults(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            stray = [p.name for p in run.path.iterdir() if not p.name.startswith(".tmp-")]
        if (run.path / "config.json").exists():
            if not resume:
                raise UserError(f"{run.path} already holds a run; go on with it by --resume, or choose another --out")
            difference = _first_difference(to_dict(run.config), to_dict(config))
            if difference:
                raise UserError(f"{run.path} holds another run: {difference}; choose another --out")
        elif stray:
            raise UserError(
                f"{run.path} is not empty and not a run (it holds {sorted(stray)[0]}); choose another --out"
            )
        with disk_faults(run.path):
            for left_over in [*run.path.glob(".tmp-*"), *run.checkpoints.glob(".tmp-*")]:
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        if not (run.path / "config.json").exists():
            write_json(run.path / "config.json", to_dict(config))
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config(self) -> RunConfig:
        path = self.path / "config.json"
        tree = read_json(path)
        try:
            return from_dict(tree)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    # -- metrics: one JSON object a line, in order of steps

    def append_metrics(self, row: dict[str, Any]) -> None:
        with disk_faults(self.path), open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every complete row; a last line that a crash cut short is not one."""
        path = self.path / "metrics.jsonl"
        rows = []
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line) if line else None
                if line and not (isinstance(row, dict) and type(row.get("step")) is int):
                    raise ValueError("not an object with a step")
            except (ValueError, RecursionError) as error:
                if number == len(lines):
                    break
                raise UserError(
                    f"{path} line {number} is damaged ({str(error)[:60]}); restore it from a copy"
                ) from None
            if row:
                rows.append(row)
        return rows

    def rewind_metrics(self, step: int) -> None:
        """Drop the rows after `step`, so that a resumed run's file reads as if it had never stopped."""
        rows = [row for row in self.metrics() if row["step"] <= step]
        write_bytes(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    # -- checkpoints

    def save_checkpoint(self, step: int, tensors: Tensors) -> None:
        final, part = self.checkpoints / f"step-{step:08d}", self.checkpoints / f".tmp-{step:08d}-{os.getpid()}"
        with disk_faults(final):
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                write_bytes(part / "state.safetensors", _serialize(tensors))
                write_manifest(part, CHECKPOINT_FILES, step)
                shutil.rmtree(final, ignore_errors=True)  # there only if it was found damaged
                os.rename(part, final)
                _sync_folder(self.checkpoints)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        # Those of later steps were found damaged, or the run would be past them.
        good = [folder for folder in self._checkpoint_folders() if _step_of(folder) <= step]
        for old in set(self._checkpoint_folders()) - set(good[:KEEP_CHECKPOINTS]):
            shutil.rmtree(old, ignore_errors=True)

    def load_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and one line for each newer one that does not."""
        skipped = []
        folders = self._checkpoint_folders()
        for number, folder in enumerate(folders, 1):
            try:
                step = verify_manifest(folder, CHECKPOINT_FILES)
                if folder.name != f"step-{step:08d}":
                    raise UserError(f"{folder} holds step {step}, not the one in its name")
                return Checkpoint(step, _deserialize(folder / "state.safetensors")), skipped
            except UserError as error:
                remedy = (
                    "going back to the one before it" if number < len(folders) else "no other is left: starting afresh"
                )
                skipped.append(f"passed over a checkpoint: {error}; {remedy}")
        return None, skipped

    def _checkpoint_folders(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"), key=_step_of, reverse=True)

    def check_corpus(self, fingerprint: str) -> None:
        """A run goes on, and is measured, only on the text that it was trained on."""
        if (self.env or {}).get("corpus_sha256") not in (None, fingerprint):
            corpus = self.config.data.corpus
            raise UserError(
                f"the corpus {corpus!r} is not the one {self.path} was trained on; restore it or train anew"
            )

    # -- the finished model

    @property
    def finished(self) -> bool:
        return (self.path / MANIFEST).exists()

    def finish(self, weights: Tensors) -> None:
        """Write the trained weights; the manifest makes the run a finished one. Its checkpoints have served then."""
        write_bytes(self.path / "model.safetensors", _serialize(weights))
        write_manifest(self.path, MODEL_FILES, self.config.train.steps)
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def weights(self) -> Tensors:
        """The finished run's weights; a UserError if it is not finished or a file of it was changed."""
        if not self.finished:
            raise UserError(f"{self.path} is not finished; go on with: tokendepth train ... --out {self.path} --resume")
        try:
            verify_manifest(self.path, MODEL_FILES)
        except UserError as error:
            raise UserError(f"{error}; restore it from a copy, or train the run anew in another folder") from None
        return _deserialize(self.path / "model.safetensors")

    @property
    def evaluation(self) -> dict[str, Any] | None:
        path = self.path / "eval.json"
        return read_json(path) if path.exists() else None

    def write_evaluation(self, tree: dict[str, Any]) -> None:
        write_json(self.path / "eval.json", tree)

    @property
    def env(self) -> dict[str, Any] | None:
        path = self.path / "env.json"
        return read_json(path) if path.exists() else None


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def _first_difference(there: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str | None:
    for key in {**there, **wanted}:
        a, b = there.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if found := _first_difference(a, b, f"{prefix}{key}."):
                return found
        elif a != b:
            return f"its {prefix}{key} is {a!r}, not {b!r}"
    return None
