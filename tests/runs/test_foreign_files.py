"""The user's files next to ours are neither removed nor written to. RELIABILITY 26."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.stopped import stopped_run
from tests.runs.samples import resumed, stopped_after_two
from tests.tiny import hashes, tiny
from tokendepth.runs.files import write_json
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


def notes(folder: Path) -> list[int]:
    """The inodes of everything that a user has put below `folder`; they stay the same even if a folder is renamed."""
    return sorted(path.stat().st_ino for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"mine")


def test_nothing_of_the_users_is_removed_or_written_to(tmp_path):
    """Copies of checkpoints and notes: in the run, among its checkpoints and inside them."""
    config, run = tiny(tmp_path, steps=8, checkpoint_every=2), Run(tmp_path / "run")
    stopped_run(config, run.path, 4)
    older, newest = (run.checkpoints / f"step-0000000{step}" for step in (2, 4))
    copies = [run.checkpoints / name for name in ("step-00000004.bak", "step-4", "copy of 4", "step-00000004 (1)")]
    for copy in copies:
        shutil.copytree(newest, copy)
    for folder in (run.path, run.checkpoints, older, newest, *copies):
        for name in ("note.txt", ".tmp-note", ".tmp-note-12", "model.bak", ".hidden"):
            (folder / name).write_text("mine")
    copied, before = [hashes(copy) for copy in copies], notes(run.path)
    assert len(before) == 5 * 8
    assert train(config, run.path, resume=True, show=False).finished
    assert [hashes(copy) for copy in copies] == copied
    assert notes(run.path) == before
    assert not [path for path in run.checkpoints.rglob("*.safetensors") if path.parent not in copies], "ours are gone"


@pytest.mark.parametrize("kind", ["file", "folder", "link", "link to nothing", "pipe"])
def test_what_has_the_name_of_the_next_checkpoint_is_put_aside(kind, tmp_path):
    run = stopped_after_two(tmp_path / "run")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "note.txt").write_text("years of work")
    in_the_way = run.checkpoints / "step-00000003"
    {
        "file": lambda: shutil.copy(mine / "note.txt", in_the_way),
        "folder": lambda: shutil.copytree(mine, in_the_way),
        "link": lambda: in_the_way.symlink_to(mine),
        "link to nothing": lambda: in_the_way.symlink_to("nothing"),
        "pipe": lambda: os.mkfifo(in_the_way),
    }[kind]()
    inode = os.lstat(in_the_way).st_ino
    checkpoint, lines = resumed(run)
    assert checkpoint.step == 2
    assert str(in_the_way) in lines[0]
    assert run.load_checkpoint()[0].step == 3
    assert os.lstat(run.checkpoints / "step-00000003.aside").st_ino == inode
    assert (mine / "note.txt").read_text() == "years of work"


def test_a_second_thing_put_aside_does_not_replace_the_first(tmp_path):
    run = stopped_after_two(tmp_path / "run")
    for text in ("first", "second"):
        shutil.rmtree(run.checkpoints / "step-00000003", ignore_errors=True)
        (run.checkpoints / "step-00000003").write_text(text)
        run.save_checkpoint(3, {"w": np.ones(3)})
    assert (run.checkpoints / "step-00000003.aside").read_text() == "first"
    assert (run.checkpoints / "step-00000003.aside1").read_text() == "second"


def test_a_linked_checkpoint_is_read_and_never_removed(tmp_path):
    run = stopped_after_two(tmp_path / "run")
    elsewhere = tmp_path / "step 2"
    (run.checkpoints / "step-00000002").rename(elsewhere)
    (run.checkpoints / "step-00000002").symlink_to(elsewhere)
    before = hashes(elsewhere)
    assert resumed(run)[0].step == 2
    for step in (4, 5):
        run.save_checkpoint(step, {"w": np.ones(3)})
    run.finish({"w": np.ones(3)})
    assert hashes(elsewhere) == before


def test_a_file_that_is_half_written_is_no_link_to_theirs(tmp_path):
    (tmp_path / "theirs").write_text("years of work")
    (tmp_path / f".tmp-eval.json-{os.getpid()}").symlink_to(tmp_path / "theirs")
    write_json(tmp_path / "eval.json", {})
    assert (tmp_path / "theirs").read_text() == "years of work"
