"""Pickles in the place of every file that is read, with manifests and checksums made to fit them."""

import contextlib
import io
import shutil
import zipfile
from pathlib import Path

import numpy as np

from benchmarks.faults.outcome import Outcome, Tell, subject
from benchmarks.faults.stopped import stopped_run
from tokendepth import data
from tokendepth.config import RunConfig
from tokendepth.data.store import cache_folder
from tokendepth.errors import UserError
from tokendepth.runs.files import MANIFEST, read_json, write_json, write_manifest
from tokendepth.runs.run import CHECKPOINT_FILES, SMALL_FILES, Run
from tokendepth.training.loop import train

NEWEST = "checkpoints/step-00000006"
STOPPED_FILES = (*SMALL_FILES, f"{NEWEST}/state.safetensors", f"{NEWEST}/{MANIFEST}")
FINISHED_FILES = (*SMALL_FILES, "model.safetensors", MANIFEST)


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
