"""What is not synced may be lost in a power cut, in any order: nothing is relied on before it is on the disk.

RELIABILITY 27; the fault-injection suite cuts the power.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.report.fakes import tsa_evaluation
from tests.runs.samples import CONFIG, small_files
from tokendepth.runs.files import MANIFEST, make_folder
from tokendepth.runs.run import SMALL_FILES, Run


@pytest.fixture
def disk(monkeypatch) -> dict[int, int]:
    """What has been synced: sizes of files and folders by their inode."""
    synced, fsync = {}, os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        facts = os.fstat(handle)
        synced[facts.st_ino] = facts.st_size

    monkeypatch.setattr(os, "fsync", watched)
    return synced


def assert_synced(disk: dict[int, int], *paths: Path) -> None:
    for path in paths:
        facts = path.stat()
        assert disk.get(facts.st_ino) == facts.st_size, f"{path} could be lost"


def test_a_checkpoint_gets_its_name_when_all_that_it_needs_is_on_the_disk(disk, tmp_path, monkeypatch):
    run = Run.create(tmp_path / "new" / "and" / "deep" / "run", CONFIG, resume=False)
    log, rename, seen = run.metrics_log(None), os.rename, []
    run.restore(small_files())
    log.restore()

    def watched(source, target):
        folders = [run.path, run.path.parent, run.path.parent.parent, tmp_path / "new", tmp_path]
        assert all(folder.stat().st_ino in disk for folder in folders), "a folder above it could be lost"
        assert_synced(disk, log.path, log.copy, *Path(source).iterdir(), Path(source))
        assert_synced(disk, *(run.path / name for name in small_files()))
        seen.append(target)
        disk.pop(run.checkpoints.stat().st_ino, None)
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    for step in (1, 2, 3):
        log.append({"step": step})
        run.save_checkpoint(step, {"w": np.full(3, step)}, small_files(), log)
        assert run.checkpoints.stat().st_ino in disk, "the checkpoint's name could be lost"
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
            disk.pop(run.path.stat().st_ino)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    run.finish({"w": np.ones(3)})
    assert len(seen) == 1
    assert run.path.stat().st_ino in disk
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
