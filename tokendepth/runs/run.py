"""Run: one training run on disk, the only place where training, evaluation, report and export meet.

    config.json  env.json  tokenizer.json  metrics.jsonl  checkpoints/
    model.safetensors  MANIFEST.json       once finished
    eval.json                              once evaluated

A checkpoint is a folder that appears whole or not at all: it is written under another name, synced, closed by a
manifest with the SHA-256 of every file, and renamed. Loading takes the newest one whose manifest verifies and names
those it passed over. It also carries the run's small files as they were, so that a good checkpoint is all that a run
needs to go on. No file is ever a pickle. Imports no torch: tensors come and go as numpy arrays.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendepth.config import RunConfig, from_dict, to_dict
from tokendepth.errors import UserError
from tokendepth.runs.files import (
    MANIFEST,
    NewerFormat,
    Tensors,
    deserialize,
    disk_faults,
    json_bytes,
    read_json,
    read_manifest,
    replace_bytes,
    serialize,
    sync_folder,
    verify_file,
    verify_manifest,
    write_bytes,
    write_json,
    write_manifest,
)
from tokendepth.trace import EXECUTIONS

KEEP_CHECKPOINTS = 2
LOCK = ".lock"
EVALUATION_VERSION = 1
CHECKPOINT_FILES = ("state.safetensors",)
SMALL_FILES = ("config.json", "env.json", "tokenizer.json", "metrics.jsonl")
MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")

# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: Tensors
    files: dict[str, bytes]
    """Those of SMALL_FILES that the run had, as they were."""


@dataclass(frozen=True)
class Run:
    """A run folder: config, metrics, checkpoints while it trains, then weights and figures.

    >>> run = td.Run.open("runs/tsa")
    >>> run.finished, run.config.recipe
    (True, 'demo.tsa')
    """

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """An existing run; a UserError where there is none."""
        run = cls(Path(path))
        # Those of os.path never raise, as Path's do for a name that is too long or a folder that may not be read.
        if os.path.isfile(run.path):
            raise UserError(f"{run.path} is a file; expected a run folder; name the folder")
        if not os.path.isdir(run.path):
            raise UserError(f"{run.path}: no such run folder; train one with tokendepth train RECIPE --out {run.path}")
        if not os.path.isfile(run.path / "config.json"):
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
            stray = [p.name for p in run.path.iterdir() if not p.name.startswith(".tmp-") and p.name != LOCK]
        if (run.path / "config.json").exists() and not resume:
            raise UserError(f"{run.path} already holds a run; go on with it by --resume, or choose another --out")
        if stray and (problem := run._problem_with(config, min(stray))) and not (resume and run._was_of(config)):
            raise UserError(problem)
        with disk_faults(run.path):
            for left_over in [*run.path.glob(".tmp-*"), *run.checkpoints.glob(".tmp-*")]:
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        if not stray:
            write_bytes(run.path / "config.json", config_bytes(config))
        return run

    def _problem_with(self, config: RunConfig, stray: str) -> str | None:
        """Why `config` cannot go on in this folder, which is not empty, as far as its config.json tells."""
        if not (self.path / "config.json").exists():
            return f"{self.path} is not empty and not a run (it holds {stray}); choose another --out"
        try:
            difference = _first_difference(to_dict(self.config), to_dict(config))
        except UserError as error:
            return str(error)
        return f"{self.path} holds another run: {difference}; choose another --out" if difference else None

    def _was_of(self, config: RunConfig) -> bool:
        """Whether the newest good checkpoint is of `config`: then it is config.json that was damaged."""
        checkpoint, _ = self.load_checkpoint()
        try:
            return checkpoint is not None and from_dict(json.loads(checkpoint.files["config.json"])) == config
        except (KeyError, ValueError):  # none, or not one that this version reads
            return False

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config(self) -> RunConfig:
        path = self._checked("config.json")
        tree = read_json(path)
        try:
            return from_dict(tree)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    # -- metrics: one JSON object a line, in order of steps

    def append_metrics(self, row: dict[str, Any]) -> bytes:
        """Add a row; returns the bytes that were added."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with disk_faults(self.path), open(self.path / "metrics.jsonl", "ab") as file:
            file.write(line)
        return line

    def metrics(self) -> list[dict[str, Any]]:
        """Every complete row; a last line that a crash cut short is not one."""
        path = self._checked("metrics.jsonl")
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

    # -- the small files: training holds them in memory, the folder and every checkpoint have a copy

    def restore(self, files: dict[str, bytes]) -> list[str]:
        """Write whichever of `files` is not as it should be; one line for each that was lost or damaged."""
        lines = []
        for name, content in files.items():
            path = self.path / name
            found = _content(path)
            if found == content:
                continue
            # A run that was stopped has metrics of steps after its checkpoint, which it will take again.
            if not (name == "metrics.jsonl" and found is not None and found.startswith(content)):
                what = "was missing or unreadable" if found is None else "was damaged"
                lines.append(f"{path} {what}; it is restored, nothing is lost")
            write_bytes(path, content)
        return lines

    def _checked(self, name: str) -> Path:
        """The path of a file that, in a finished run, is still as it was when the run was finished."""
        if self.finished:
            with _remedy_of_finished():
                _, files = read_manifest(self.path)
                if name in files:
                    verify_file(self.path / name, files[name])
        return self.path / name

    # -- checkpoints

    def save_checkpoint(self, step: int, tensors: Tensors, files: dict[str, bytes] | None = None) -> None:
        final, part = self.checkpoints / f"step-{step:08d}", self.checkpoints / f".tmp-{step:08d}-{os.getpid()}"
        with disk_faults(final):
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                replace_bytes(part / "state.safetensors", serialize({**tensors, **_as_tensors(files or {})}))
                write_manifest(part, CHECKPOINT_FILES, step)
                shutil.rmtree(final, ignore_errors=True)  # there only if it was found damaged
                os.rename(part, final)
                sync_folder(self.checkpoints)
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
                tensors = deserialize(folder / "state.safetensors")
                return Checkpoint(step, tensors, _taken_files(tensors)), skipped
            except NewerFormat:
                raise
            except UserError as error:
                remedy = (
                    "going back to the one before it" if number < len(folders) else "no other is left: starting afresh"
                )
                skipped.append(f"passed over a checkpoint: {error}; {remedy}")
        return None, skipped

    def check_checkpoint(self, checkpoint: Checkpoint, config: RunConfig, fingerprint: str) -> None:
        """One that verifies may still be of another run: whoever moves folders can mix them up."""
        folder, difference = self.checkpoints / f"step-{checkpoint.step:08d}", None
        there, env = (checkpoint.files.get(name, b"null") for name in ("config.json", "env.json"))
        try:
            if (tree := json.loads(there)) is not None:
                difference = _first_difference(to_dict(from_dict(tree)), to_dict(config))
            facts = json.loads(env)
        except ValueError as error:  # a UserError is one too
            raise UserError(f"{folder} is of a run that this version cannot read ({error}); remove it") from None
        if not difference and isinstance(facts, dict) and facts.get("corpus_sha256", fingerprint) != fingerprint:
            difference = f"its corpus {config.data.corpus!r} had another content"
        if difference:
            remedy = "put the run's own checkpoint in its place, or remove it to go on without it"
            raise UserError(f"{folder} is of another run: {difference}; {remedy}")

    def _checkpoint_folders(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"), key=_step_of, reverse=True)

    def check_corpus(self, fingerprint: str) -> None:
        """A run goes on, and is measured, only on the text that it was trained on."""
        env = self.env
        if env is None:  # not begun
            return
        if not isinstance(env, dict) or "corpus_sha256" not in env:
            raise UserError(f"{self.path / 'env.json'} is damaged: it does not name the corpus; restore it from a copy")
        if env["corpus_sha256"] != fingerprint:
            corpus = self.config.data.corpus
            raise UserError(
                f"the corpus {corpus!r} or its tokenizer is not the one {self.path} was trained on; restore it, or "
                "train anew"
            )

    # -- the finished model

    @property
    def finished(self) -> bool:
        return os.path.exists(self.path / MANIFEST)

    def finish(self, weights: Tensors) -> None:
        """Write the trained weights; the manifest makes the run a finished one. Its checkpoints have served then."""
        small = [name for name in SMALL_FILES if (self.path / name).exists()]
        with disk_faults(self.path):
            replace_bytes(self.path / "model.safetensors", serialize(weights))
            write_manifest(self.path, tuple(sorted({*MODEL_FILES, *small})), self.config.train.steps)
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def verify(self) -> None:
        """A UserError if the run is not finished, or a file of it was changed since."""
        if not self.finished:
            missing = f", or {self.path / MANIFEST} was lost" if (self.path / "model.safetensors").exists() else ""
            remedy = f"go on with: tokendepth train ... --out {self.path} --resume"
            raise UserError(f"{self.path} is not finished{missing}; {remedy}")
        with _remedy_of_finished():
            verify_manifest(self.path, MODEL_FILES, SMALL_FILES)

    @property
    def fingerprint(self) -> str:
        """Of the finished run's weights: as good as they are, and shorter."""
        _, files = read_manifest(self.path)
        return files["model.safetensors"]["sha256"]

    def weights(self) -> Tensors:
        """The finished run's weights, verified."""
        self.verify()
        with _remedy_of_finished():
            return deserialize(self.path / "model.safetensors")

    @property
    def evaluation(self) -> dict[str, Any] | None:
        path = self.path / "eval.json"
        if not path.exists():
            return None
        remedy = f"measure the run again: tokendepth evaluate {self.path}"
        tree = read_json(path, remedy)
        if problem := _problem_of_evaluation(tree):
            raise UserError(f"{path} {problem}; {remedy}")
        return tree

    def write_evaluation(self, tree: dict[str, Any]) -> None:
        write_json(self.path / "eval.json", tree)

    @property
    def env(self) -> dict[str, Any] | None:
        path = self._checked("env.json")
        return read_json(path) if path.exists() else None


def config_bytes(config: RunConfig) -> bytes:
    return json_bytes(to_dict(config))


def _problem_of_evaluation(tree: Any) -> str | None:
    version = tree.get("version") if isinstance(tree, dict) else None
    if type(version) is not int:
        return "is damaged: it is no evaluation that tokendepth wrote"
    if version != EVALUATION_VERSION:
        return f"has version {version}; this tokendepth reads version {EVALUATION_VERSION}"
    # Every run is measured under hard; an older evaluation may lack another.
    wrong = [name for name in EXECUTIONS if not isinstance(tree.get(name), dict if name == "hard" else dict | None)]
    return f"is damaged: its {wrong[0]} figures are missing or wrong" if wrong else None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def _remedy_of_finished() -> Iterator[None]:
    try:
        yield
    except NewerFormat:
        raise
    except UserError as error:
        raise UserError(f"{error}; restore it from a copy, or train the run anew in another folder") from None


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


def _as_tensors(files: dict[str, bytes]) -> Tensors:
    import numpy as np

    return {f"file/{name}": np.frombuffer(content, np.uint8) for name, content in files.items()}


def _taken_files(tensors: Tensors) -> dict[str, bytes]:
    """Take the small files out of a checkpoint's tensors."""
    taken = {name: tensors.pop(f"file/{name}", None) for name in SMALL_FILES}
    return {name: array.tobytes() for name, array in taken.items() if array is not None}
