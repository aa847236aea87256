"""Files of a run that rot: each of them missing, cut, emptied or with one bit flipped; and pickles in their place."""

import contextlib
import io
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.outcome import Outcome, Tell, subject
from tokendepth import data
from tokendepth.config import RunConfig
from tokendepth.data.store import cache_folder
from tokendepth.errors import UserError
from tokendepth.runs.files import MANIFEST, read_json, write_json, write_manifest
from tokendepth.runs.run import CHECKPOINT_FILES, SMALL_FILES, Run
from tokendepth.training.loop import _Training, train
from tokendepth.training.progress import console

NEWEST = "checkpoints/step-00000006"
STOPPED_FILES = (*SMALL_FILES, f"{NEWEST}/state.safetensors", f"{NEWEST}/{MANIFEST}")
FINISHED_FILES = (*SMALL_FILES, "model.safetensors", MANIFEST)


def _flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


KINDS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "bit flip": _flipped,
}


class Stopped(Exception):
    """Stands for whatever ends a process."""


@contextlib.contextmanager
def at_step(chosen: int, action: Callable[[Any], object]) -> Iterator[None]:
    """Let every training do `action` before it takes step number `chosen` (from 0)."""
    real = _Training._step

    def wrapped(self: _Training, step: int) -> None:
        if step == chosen:
            action(self)
        real(self, step)

    _Training._step = wrapped
    try:
        yield
    finally:
        _Training._step = real


def stopped_run(config: RunConfig, out: Path, step: int) -> Run:
    """A run that ended before it took step number `step`."""

    def stop(training: Any) -> None:
        raise Stopped

    with at_step(step, stop), contextlib.suppress(Stopped):
        train(config, out, show=False)
    return Run(out)


def replace_content(path: Path, content: bytes | None) -> None:
    path.unlink() if content is None else path.write_bytes(content)


def damage(folder: Path, count: int, tell: Tell) -> Outcome:
    """A damaged file of a stopped run is found, named and made up for; of a finished one found, named and refused."""
    outcome = Outcome()
    config = subject(folder, steps=8)
    finished = train(config, folder / "finished", show=False)
    stopped = stopped_run(config, folder / "stopped", 6)
    kinds = [(name, kind) for name in STOPPED_FILES for kind in KINDS][:count]
    also = [(name, kind) for name in FINISHED_FILES for kind in KINDS][:count]
    for name, kind in kinds:
        run = Run(shutil.copytree(stopped.path, folder / f"stopped-{outcome.attempts}"))
        path = run.path / name
        replace_content(path, KINDS[kind](path.read_bytes()))
        with console.capture() as heard:
            try:
                train(config, run.path, resume=True)
            except UserError as error:
                outcome.check(False, f"{name} {kind}: {error}")
        lines = [line for line in heard.get().splitlines() if str(path) in line]
        outcome.check(len(lines) == 1, f"{name} {kind}: said {heard.get()!r}")
        outcome.said(lines, run.path)
        outcome.compare(run, finished)
        outcome.attempts += 1
        tell(outcome.attempts, len(kinds) + len(also))
    outcome.figures["gone on with, bit-identical"] = outcome.attempts - len(outcome.failures)
    for name, kind in also:
        run = Run(shutil.copytree(finished.path, folder / f"finished-{outcome.attempts}"))
        path = run.path / name
        replace_content(path, KINDS[kind](path.read_bytes()))
        try:
            run.weights()
            outcome.check(False, f"finished, {name} {kind}: accepted")
        except UserError as error:
            outcome.check(str(path) in str(error), f"finished, {name} {kind}: {error}")
            outcome.said([str(error)], run.path)
        outcome.attempts += 1
        tell(outcome.attempts, len(kinds) + len(also))
    return outcome


# --- pickles ----------------------------------------------------------------------------------------------------------


def payloads(canary: Path) -> dict[str, bytes]:
    """Files that would make the folder `canary` if anything unpickled them."""
    # GLOBAL os.mkdir, its argument, REDUCE, STOP; spelt out, because this package has no pickle module at hand.
    plain = f"cos\nmkdir\n(V{canary}\ntR.".encode()
    with_header = b"\x80\x02" + plain
    torch_file = io.BytesIO()
    with zipfile.ZipFile(torch_file, "w") as archive:
        archive.writestr("archive/data.pkl", with_header)
        archive.writestr("archive/version", "3\n")
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return {
        "pickle": plain,
        "pickle 2": with_header,
        "torch.save": torch_file.getvalue(),
        "object array": array.getvalue() + with_header,
    }


def pickle(folder: Path, count: int, tell: Tell) -> Outcome:
    """Pickles in the place of every file that is read, with manifests and checksums made to fit them."""
    outcome = Outcome()
    config = subject(folder, steps=8)
    finished = train(config, folder / "finished", show=False)
    stopped = stopped_run(config, folder / "stopped", 6)
    canary = folder / "executed"
    kinds = payloads(canary)
    places = {
        **{f"stopped, {name}": (stopped, name) for name in STOPPED_FILES},
        **{f"finished, {name}": (finished, name) for name in FINISHED_FILES},
    }
    for place, (original, name) in list(places.items())[:count]:
        for kind, content in kinds.items():
            run = Run(shutil.copytree(original.path, folder / f"run-{outcome.attempts}"))
            (run.path / name).write_bytes(content)
            if name.endswith("state.safetensors"):
                write_manifest(run.path / NEWEST, CHECKPOINT_FILES, 6)
            if original is finished and name != MANIFEST:
                write_manifest(run.path, tuple(FINISHED_FILES[:-1]), 8)
            try:
                _read_everything(run, config)
            except UserError as error:
                outcome.said([str(error)], run.path)
            except Exception as error:
                outcome.check(False, f"{place}, {kind}: {error!r}")
            outcome.check(not canary.exists(), f"{place}, {kind}: executed")
            outcome.attempts += 1
            tell(outcome.attempts, (len(places) + 1) * len(kinds))
    for kind, content in kinds.items():
        _pickle_in_the_token_cache(config, content)
        with contextlib.redirect_stderr(io.StringIO()):  # it says that it builds the tokens again
            data.load(config.data)
        outcome.check(not canary.exists(), f"token cache, {kind}: executed")
        outcome.attempts += 1
        tell(outcome.attempts, (len(places) + 1) * len(kinds))
    return outcome


def _read_everything(run: Run, config: RunConfig) -> None:
    if run.finished:
        _ = run.config, run.env, run.metrics(), run.weights()
    else:
        train(config, run.path, resume=True, show=False)


def _pickle_in_the_token_cache(config: RunConfig, content: bytes) -> None:
    """In the ids' place, with an index that vouches for it."""
    from tokendepth.data import store

    data.load(config.data)
    for index in (cache_folder() / "tokens").glob("*.json"):
        index.with_suffix(".npy").write_bytes(content)
        tree = read_json(index)["index"]
        write_json(index, store._sealed({**tree, "ids_sha256": store.sha256(index.with_suffix(".npy"))}))
