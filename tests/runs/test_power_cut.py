"""A power cut may lose unsynced data, in any order: nothing is relied on before it is on the disk.

RELIABILITY 27; the fault-injection suite cuts the power.
"""

import contextlib
import os
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.power import Disk, PowerCut
from tests.report.fakes import tsa_evaluation
from tests.runs.samples import CONFIG, small_files
from tokendepth.runs.files import MANIFEST, make_folder, write_bytes
from tokendepth.runs.run import SMALL_FILES, Run


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    with disk.watched():
        yield disk
    disk.close()


def assert_synced(disk: Disk, *paths: Path) -> None:
    for path in paths:
        assert disk.holds(path), f"{path} could be lost"


def test_a_checkpoint_gets_its_name_when_all_that_it_needs_is_on_the_disk(disk, tmp_path, monkeypatch):
    run = Run.create(tmp_path / "new" / "and" / "deep" / "run", CONFIG, resume=False)
    log, rename, seen = run.metrics_log(None), os.rename, []
    run.restore(small_files())
    log.restore()

    def watched(source, target):
        assert_synced(disk, run.path, run.path.parent, run.path.parent.parent, tmp_path / "new", tmp_path)
        assert_synced(disk, log.path, log.copy, *Path(source).iterdir(), Path(source))
        assert_synced(disk, *(run.path / name for name in small_files()))
        seen.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    for step in (1, 2, 3):
        log.append({"step": step})
        run.save_checkpoint(step, {"w": np.full(3, step)}, small_files(), log)
        assert "step-0000000" + str(step) in disk.synced[run.checkpoints.stat().st_ino], "its name could be lost"
    assert len(seen) == 3


def test_a_run_is_finished_when_all_of_it_is_on_the_disk(disk, tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", CONFIG, resume=False)
    log, replace, seen = run.metrics_log(None), os.replace, []
    run.restore(small_files())
    log.restore()
    log.append({"step": 1})
    run.save_checkpoint(1, {"w": np.ones(3)}, small_files(), log)
    log.append({"step": 2})

    def watched(source, target):
        if Path(target) == run.path / MANIFEST:
            assert_synced(disk, Path(source), *(run.path / name for name in (*SMALL_FILES, "model.safetensors")))
            assert run.load_checkpoint()[0] is not None, "what it needs to go on is removed after the manifest is there"
            seen.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    run.finish({"w": np.ones(3)})
    assert len(seen) == 1
    assert MANIFEST in disk.synced[run.path.stat().st_ino]
    assert not run.checkpoints.exists()
    run.write_evaluation(tsa_evaluation(text="ab"))
    assert_synced(disk, run.path / "eval.json")


def test_a_folder_that_may_not_be_listed_is_made_all_the_same(tmp_path, monkeypatch):
    real = os.open

    def denied(path, flags, *mode):
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", denied)
    make_folder(tmp_path / "run")
    assert (tmp_path / "run").is_dir()


# --- the disk that forgets --------------------------------------------------------------------------------------------


def left_after(folder: Path, work, cut_at: int, seed: int) -> Path:
    """What remains after a power cut of a folder in which `work` is done."""
    live, left = folder / f"live-{cut_at}-{seed}", folder / f"left-{cut_at}-{seed}"
    live.mkdir()
    disk = Disk(live)
    with contextlib.suppress(PowerCut), disk.watched(cut_at, random.Random(seed)):
        work(live)
        os.mkdir(live / "end")  # a last moment, after all operations
    assert disk.after, "it was not cut"
    disk.after(left)
    disk.close()
    return left


def test_what_was_synced_is_left_and_what_was_not_may_be_gone_in_any_order(tmp_path):
    def work(folder):
        write_bytes(folder / "kept", b"content")
        (folder / "one").write_bytes(b"1")
        (folder / "two").write_bytes(b"22")

    found = set()
    for seed in range(60):
        left = left_after(tmp_path, work, 8, seed)  # after unlink (in vain), fsync, replace and fsync: before mkdir
        assert (left / "kept").read_bytes() == b"content"
        found |= {frozenset((path.name, path.read_bytes()) for path in left.iterdir() if path.name != "kept")}
    assert frozenset() in found
    assert frozenset({("one", b"1"), ("two", b"22")}) in found
    assert any({name for name, _ in names} == {"two"} for names in found), "the later one without the one before"
    assert any(("two", b"\0\0") in names for names in found), "a size without its bytes"
