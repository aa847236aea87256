"""The checkpoints of a run: atomically written folders.

Each one is written under a temporary name, synced, completed by a manifest with the SHA-256 of its file, and renamed.
It also holds the run's small files, so a single intact checkpoint is enough to continue. Only folders with the name and
the files of a checkpoint are ever removed; copies and notes of the user stay.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokendepth.errors import UserError
from tokendepth.runs import shapes
from tokendepth.runs.files import (
    MANIFEST,
    Facts,
    NewerFormat,
    Tensors,
    deserialize,
    disk_faults,
    json_bytes,
    make_folder,
    parse_json,
    put_aside,
    remove,
    remove_left_overs,
    rename,
    replace_bytes,
    serialize,
    verify_manifest,
    write_manifest,
)
from tokendepth.runs.metrics import METRICS, MetricsLog
from tokendepth.runs.shapes import problem

KEEP_CHECKPOINTS = 2
CHECKPOINT_FILES = ("state.safetensors",)
CARRIED_FILES = ("config.json", "env.json", "tokenizer.json")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: Tensors
    files: dict[str, bytes]
    """Content of the run's CARRIED_FILES at that time."""
    metrics: Facts | None = None
    """Size and SHA-256 of metrics.jsonl at that time."""
    rows: bytes | None = None
    """metrics.jsonl itself, in checkpoints of format 1."""


def save(folder: Path, step: int, tensors: Tensors, files: dict[str, bytes], metrics: MetricsLog | None) -> None:
    """Add a checkpoint; only the last two are kept."""
    final, part = folder / f"step-{step:08d}", folder / f".tmp-{step:08d}-{os.getpid()}"
    with disk_faults(final):
        make_folder(folder)
        remove_left_overs(folder, f"{step:08d}")
        try:
            part.mkdir()
            noted = {"metrics": json_bytes(metrics.facts())} if metrics else {}
            state = {**tensors, "step": np.array(step), **_as_tensors({**files, **noted})}
            replace_bytes(part / "state.safetensors", serialize(state))
            write_manifest(part, CHECKPOINT_FILES, step)
            _clear(final)  # it exists only if it was found damaged
            rename(part, final)
        except BaseException:
            remove_left_overs(folder, f"{step:08d}")
            raise
    # Checkpoints of later steps must be damaged, or the run would have continued from them.
    ours = [path for path in _named(folder) if path.is_dir() and not path.is_symlink()]
    good = [path for path in ours if _step_of(path) <= step]
    for old in set(ours) - set(good[:KEEP_CHECKPOINTS]):
        with contextlib.suppress(OSError):
            _clear(old)


def load(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and one line for each newer, damaged one."""
    skipped = []
    named = _named(folder)
    for number, path in enumerate(named, 1):
        try:
            return _read(path), skipped
        except NewerFormat:
            raise
        except UserError as error:
            remedy = (
                "going back to the one before it" if number < len(named) else "no other is left: starting from scratch"
            )
            skipped.append(f"passed over a checkpoint: {error}; {remedy}")
    return None, skipped


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of a finished run; the folder stays if it holds anything else."""
    for path in _named(folder):
        remove(path, [*CHECKPOINT_FILES, MANIFEST])
    remove(folder, [METRICS])


def _named(folder: Path) -> list[Path]:
    """Folders named like checkpoints, latest step first."""
    return sorted((path for path in folder.glob("step-*") if _step_of(path) >= 0), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    """The step in the name; -1 if it is not a checkpoint's name, such as step-00000020.bak."""
    digits = path.name.removeprefix("step-")
    is_ours = re.fullmatch("[0-9]{8,12}", digits) and path.name == f"step-{int(digits):08d}"
    return int(digits) if is_ours else -1


def _clear(path: Path) -> None:
    """Remove a checkpoint; anything else, or one with other files in it, is renamed. The caller handles OSErrors."""
    remove(path, [*CHECKPOINT_FILES, MANIFEST])
    if os.path.lexists(path):
        put_aside(path)


def _read(path: Path) -> Checkpoint:
    step = verify_manifest(path, CHECKPOINT_FILES).step
    state = path / "state.safetensors"
    tensors = deserialize(state)
    if bad := next((name for name, array in tensors.items() if not np.isfinite(array).all()), None):
        raise UserError(f"{state} is damaged: its {bad} is not finite")
    if step != _step_of(path) or not np.array_equal(tensors.pop("step", step), step):
        raise UserError(f"{path} holds a different step than its name says")
    files = {name: array.tobytes() for name in (*CARRIED_FILES, METRICS, "metrics")
             if (array := tensors.pop(f"file/{name}", None)) is not None}  # fmt: skip
    rows, noted = files.pop(METRICS, None), files.pop("metrics", None)
    return Checkpoint(step, tensors, files, None if noted is None else _noted(state, noted), rows)


def _noted(path: Path, content: bytes) -> Facts:
    facts: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        facts = parse_json(content)
    if problem(facts, shapes.FACTS):
        raise UserError(f"{path} is damaged: it does not record size and SHA-256 of metrics.jsonl")
    return facts


def _as_tensors(files: dict[str, bytes]) -> Tensors:
    return {f"file/{name}": np.frombuffer(content, np.uint8) for name, content in files.items()}
