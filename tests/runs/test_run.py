"""The run folder: files appear complete, and damaged ones are never accepted."""

import builtins
import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import add_rows, edit_json, hashes, one_line
from tokendepth.config import DenseConfig, RunConfig, TrainConfig, TSAConfig, to_dict
from tokendepth.errors import UserError
from tokendepth.runs import files
from tokendepth.runs import run as runs
from tokendepth.runs.checkpoints import KEEP_CHECKPOINTS, Checkpoint
from tokendepth.runs.files import MANIFEST, verify_manifest, write_json, write_manifest
from tokendepth.runs.run import Run

CONFIG = RunConfig(method=TSAConfig(), train=TrainConfig(steps=9))
STATE = "state.safetensors"
FULL = OSError(errno.ENOSPC, "No space left on device")


def tensors(step: int) -> dict[str, np.ndarray]:
    weights = np.random.default_rng(step).standard_normal((5, 7)).astype(np.float32)
    return {"model.w": weights, "exp_avg.w": weights / 10, "progress": np.array([step * 64.0, step / 3])}


def evaluation(loss: float) -> dict[str, Any]:
    figures = {"loss": loss, "active_fraction": 0.5}
    return {"version": runs.EVALUATION_VERSION, "method": "tsa", "hard": figures, "curve": [], "passage": None}


def assert_holds(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    expected = tensors(step)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert checkpoint.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(checkpoint.tensors[name], array)


def folder_of(run: Run, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def left_overs(run: Run) -> list[str]:
    return [name for name in hashes(run.path) if ".tmp-" in name]


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", CONFIG, resume=False)


@pytest.fixture
def saved(run) -> Run:
    """A run with checkpoints of steps 1 and 2."""
    run.save_checkpoint(1, tensors(1))
    run.save_checkpoint(2, tensors(2))
    return run


@pytest.fixture
def finished(saved) -> Run:
    write_json(saved.path / "tokenizer.json", {"kind": "byte"})
    saved.finish({"w": np.arange(12, dtype=np.float32).reshape(3, 4)})
    return saved


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_saved(saved):
    checkpoint, skipped = saved.load_checkpoint()
    assert_holds(checkpoint, 2)
    assert skipped == []
    assert left_overs(saved) == []


def test_the_same_tensors_always_make_the_same_file(finished):
    """So that `sha256sum model.safetensors` shows whether two runs gave the same result."""
    contents = {(finished.path / "model.safetensors").read_bytes()}
    for _ in range(20):
        finished.finish(finished.weights())
        contents.add((finished.path / "model.safetensors").read_bytes())
    assert len(contents) == 1


def test_no_checkpoint_is_none(run):
    assert run.load_checkpoint() == (None, [])


def test_the_manifest_holds_size_and_sha256_of_every_file(saved):
    folder = folder_of(saved, 2)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["version"] == 2
    assert manifest["step"] == 2
    content = (folder / STATE).read_bytes()
    assert manifest["files"] == {STATE: {"bytes": len(content), "sha256": hashes(folder)[STATE]}}
    assert sorted(hashes(folder)) == sorted([STATE, MANIFEST])
    assert verify_manifest(folder, (STATE,)).step == 2


def test_a_checkpoint_is_not_seen_before_it_is_whole(saved, monkeypatch):
    """When its folder gets its name, both files are in it and intact, and every byte has been synced."""
    seen, synced, rename, fsync = [], set(), os.rename, os.fsync

    def watched_fsync(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def watched_rename(source, target):
        assert sorted(os.listdir(source)) == sorted([STATE, MANIFEST])
        assert {os.stat(Path(source, name)).st_ino for name in os.listdir(source)} <= synced
        assert not Path(target).exists()
        seen.append((verify_manifest(Path(source), (STATE,)).step, Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    saved.save_checkpoint(3, tensors(3))
    assert seen == [(3, "step-00000003")]
    assert os.stat(saved.checkpoints).st_ino in synced  # otherwise the new name could be lost


def test_the_last_two_are_kept(run):
    assert KEEP_CHECKPOINTS == 2
    for step in (1, 2, 3, 5, 1000):
        run.save_checkpoint(step, tensors(step))
        assert_holds(run.load_checkpoint()[0], step)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000005", "step-00001000"]


def test_the_newest_is_the_one_of_most_steps_however_many_digits(run):
    for step in (99_999_999, 100_000_000):  # TrainConfig allows up to 10**9
        run.save_checkpoint(step, tensors(step))
        assert_holds(run.load_checkpoint()[0], step)


def test_saving_takes_the_place_of_a_damaged_checkpoint_of_that_step(saved):
    (folder_of(saved, 2) / STATE).write_bytes(b"")
    saved.save_checkpoint(2, tensors(2))
    checkpoint, skipped = saved.load_checkpoint()
    assert_holds(checkpoint, 2)
    assert skipped == []


@pytest.mark.parametrize(("damaged", "new"), [((9,), (5, 6, 7)), ((9, 4), (1, 2, 3))])
def test_damaged_later_checkpoints_do_not_push_out_the_new_ones(run, damaged, new):
    """A run that went back saves earlier steps than the damaged ones; its last two checkpoints must stay."""
    for step in (4, 9):
        run.save_checkpoint(step, tensors(step))
    for step in damaged:
        (folder_of(run, step) / STATE).write_bytes(b"")
    for step in new:
        run.save_checkpoint(step, tensors(step))
        assert_holds(run.load_checkpoint()[0], step)
    damage(folder_of(run, new[-1]) / STATE, "half")
    assert_holds(run.load_checkpoint()[0], new[-2])


def flip(content: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "last byte lost": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "first byte flipped": lambda content: flip(content, 0),
    "quarter flipped": lambda content: flip(content, len(content) // 4, 3),
    "middle flipped": lambda content: flip(content, len(content) // 2, 5),
    "last byte flipped": lambda content: flip(content, len(content) - 1, 7),
    "zeros": lambda content: bytes(len(content)),
    "noise": lambda content: random.Random(0).randbytes(len(content)),
    "text": lambda content: b"hello",
    "null": lambda content: b"null",
    "empty object": lambda content: b"{}",
    "deep": lambda content: b"[" * 100_000,
    "huge number": lambda content: b"9" * 100_000,
    "pickle": lambda content: b"cos\nsystem\n(S'exit 1'\ntR.",
    "not UTF-8": lambda content: b'{"sha256": "\xff"}',
}


def damage(path: Path, kind: str) -> None:
    content = DAMAGE[kind](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_damage_is_found_and_the_checkpoint_before_is_taken(saved, name, kind):
    path = folder_of(saved, 2) / name
    damage(path, kind)
    checkpoint, skipped = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    (line,) = skipped
    assert "\n" not in line
    assert str(path) in line
    assert "going back to the one before it" in line


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_file_of_another_checkpoint_is_found(saved, name):
    shutil.copy(folder_of(saved, 1) / name, folder_of(saved, 2) / name)
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert str(folder_of(saved, 2)) in line


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_a_folder_in_place_of_a_file_is_found(saved, name):
    path = folder_of(saved, 2) / name
    path.unlink()
    path.mkdir()
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert str(path) in line


@pytest.mark.parametrize("name", [STATE, MANIFEST])
def test_every_single_flipped_bit_is_found(saved, name):
    path = folder_of(saved, 2) / name
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            path.write_bytes(flip(content, position, bit))
            checkpoint, skipped = saved.load_checkpoint()
            assert checkpoint is not None
            assert checkpoint.step == 1, f"bit {bit} of byte {position} of {name} was accepted"
            assert len(skipped) == 1
    path.write_bytes(content)
    assert_holds(saved.load_checkpoint()[0], 2)


@pytest.mark.parametrize(
    "change",
    [(b" ", b"\t"), (b"\n", b"\r"), (b"}\n", b"}"), (b'"step"', b'"\\u0073tep"')],
    ids=["tabs", "line ends", "last line end", "escape"],
)
def test_a_manifest_of_the_same_meaning_but_other_bytes_is_refused(saved, change):
    """RELIABILITY 8: nothing is accepted unless it is byte-identical."""
    path = folder_of(saved, 2) / MANIFEST
    before = path.read_bytes()
    path.write_bytes(before.replace(*change))
    assert path.read_bytes() != before
    assert_holds(saved.load_checkpoint()[0], 1)


def test_random_mutations_are_never_accepted(tmp_path_factory):
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    run = Run.create(tmp_path_factory.mktemp("mutations") / "run", CONFIG, resume=False)
    for step in (1, 2):
        run.save_checkpoint(step, tensors(step))
    original = {name: (folder_of(run, 2) / name).read_bytes() for name in (STATE, MANIFEST)}
    interesting = st.sampled_from([b"", b"\0", b"\xff", b" ", b"\n", b"0", b"9", b"-", b'"', b"{", b"}", b",", b"[1]"])
    edit = st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=4) | interesting)
    edits = st.lists(edit, min_size=1, max_size=5)

    @hypothesis.settings(max_examples=500)
    @hypothesis.given(st.dictionaries(st.sampled_from([STATE, MANIFEST]), edits, min_size=1))
    def never_accepted(mutations):
        for name, content in original.items():
            mutated = bytearray(content)
            for where, length, new in mutations.get(name, []):
                start = int(where * len(mutated))
                mutated[start : start + length] = new
            (folder_of(run, 2) / name).write_bytes(mutated)
        same = all((folder_of(run, 2) / name).read_bytes() == content for name, content in original.items())
        checkpoint, skipped = run.load_checkpoint()
        assert_holds(checkpoint, 2 if same else 1)
        assert len(skipped) == (0 if same else 1)

    never_accepted()


def test_when_all_are_damaged_there_is_none_and_a_line_for_each(saved):
    damage(folder_of(saved, 2) / STATE, "half")
    damage(folder_of(saved, 1) / MANIFEST, "missing")
    checkpoint, skipped = saved.load_checkpoint()
    assert checkpoint is None
    assert [
        ("\n" in line, str(folder_of(saved, step)) in line) for line, step in zip(skipped, (2, 1), strict=True)
    ] == [
        (False, True),
        (False, True),
    ]


def test_the_line_of_the_oldest_damaged_checkpoint_promises_no_earlier_one(saved):
    for step in (1, 2):
        damage(folder_of(saved, step) / STATE, "half")
    _, skipped = saved.load_checkpoint()
    assert "the one before it" in skipped[0]
    assert "the one before it" not in skipped[1]


def test_a_checkpoint_under_another_number_is_refused(saved):
    folder_of(saved, 2).rename(folder_of(saved, 7))
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert "step-00000007" in line


@pytest.mark.parametrize(
    "name", ["step-", "step-foreign", "step--0000002", "step-2.0", "step-2", "step-000000002", "step-\u00b2", "latest"]
)
def test_a_folder_that_is_named_otherwise_is_no_checkpoint(saved, name):
    folder_of(saved, 2).rename(saved.checkpoints / name)
    checkpoint, lines = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert lines == []


def sealed(manifest: dict) -> bytes:
    """As tokendepth would write it, with a correct checksum of its own."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=2) + "\n").encode()


def test_a_manifest_is_sealed_as_these_tests_seal_one(saved):
    content = (folder_of(saved, 2) / MANIFEST).read_bytes()
    manifest = json.loads(content)
    del manifest["sha256"]
    assert sealed(manifest) == content


FOREIGN_MANIFESTS = {
    "nothing": {},
    "no version": {"step": 2, "files": {}},
    "version as text": {"version": "1", "step": 2, "files": {}},
    "no files": {"version": 1, "step": 2},
    "files as a list": {"version": 1, "step": 2, "files": [STATE]},
    "no file named": {"version": 1, "step": 2, "files": {}},
    "file without facts": {"version": 1, "step": 2, "files": {STATE: {}}},
    "file as text": {"version": 1, "step": 2, "files": {STATE: "x"}},
    "no step": {"version": 1, "files": {}},
    "step as text": {"version": 1, "step": "2", "files": {}},
    "step as fraction": {"version": 1, "step": 2.5, "files": {}},
    "step null": {"version": 1, "step": None, "files": {}},
}


@pytest.mark.parametrize("kind", FOREIGN_MANIFESTS)
def test_a_foreign_manifest_with_a_right_checksum_is_passed_over(saved, kind):
    """RELIABILITY 8: every error is a UserError."""
    path = folder_of(saved, 2) / MANIFEST
    path.write_bytes(sealed(FOREIGN_MANIFESTS[kind]))
    if kind == "no file named":
        (folder_of(saved, 2) / STATE).unlink()
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert str(folder_of(saved, 2)) in line


@pytest.mark.parametrize("content", [b"", b"hello", b"cposix\nsystem\n(S'touch owned'\ntR."])
def test_a_file_that_is_not_safetensors_is_passed_over_though_its_manifest_fits(saved, content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder_of(saved, 2) / STATE).write_bytes(content)
    write_manifest(folder_of(saved, 2), (STATE,), 2)
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert STATE in line
    assert not (tmp_path / "owned").exists()


def test_a_newer_format_is_refused_and_its_work_left_alone(saved):
    """They are not damaged: going back would repeat the steps of a later version and remove its checkpoints."""
    path = folder_of(saved, 2) / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_bytes(sealed({**manifest, "version": 3, "files": "of a later design"}))
    before = hashes(saved.path)
    with pytest.raises(UserError, match="format 3, newer than 2; upgrade tokendepth") as raised:
        saved.load_checkpoint()
    one_line(raised.value)
    assert hashes(saved.path) == before


def test_a_damaged_version_is_no_newer_format(saved):
    path = folder_of(saved, 2) / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 3'))
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert "damaged" in line


def test_a_bad_sector_in_the_newest_checkpoint_is_passed_over(saved, monkeypatch):
    def broken_open(path, *args, **kwargs):
        if Path(path) == folder_of(saved, 2) / STATE:
            raise OSError(errno.EIO, "Input/output error")
        return builtins.open(path, *args, **kwargs)

    monkeypatch.setattr(files, "open", broken_open, raising=False)
    checkpoint, (line,) = saved.load_checkpoint()
    assert_holds(checkpoint, 1)
    assert str(folder_of(saved, 2) / STATE) in line


# --- disk failures ----------------------------------------------------------------------------------------------------


def fail_at(monkeypatch, module: object, name: str, number: int, error: OSError) -> list[int]:
    """Let call `number` (from 1) of `module.name` raise; the returned list grows by one at each call."""
    real, calls = getattr(module, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)
    return calls


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir"])
def test_a_full_disk_while_saving_leaves_the_old_checkpoint(saved, call):
    """At every call that can fail, in turn."""
    faults, before = 0, hashes(folder_of(saved, 2))
    while True:
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, os, call, faults + 1, FULL)
            try:
                saved.save_checkpoint(3, tensors(3))
            except UserError as error:
                message = one_line(error)
            else:
                break
        assert len(calls) == faults + 1
        faults += 1
        assert "no space is left" in message
        assert "--resume" in message
        assert str(saved.checkpoints) in message
        assert left_overs(saved) == []
        checkpoint, skipped = saved.load_checkpoint()
        assert skipped == []
        assert_holds(checkpoint, 3 if folder_of(saved, 3).exists() else 2)
        assert hashes(folder_of(saved, 2)) == before
        shutil.rmtree(folder_of(saved, 3), ignore_errors=True)
    assert faults >= 1, f"saving never calls os.{call}"
    assert_holds(saved.load_checkpoint()[0], 3)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
def test_other_faults_of_a_disk_are_one_line_too(saved, monkeypatch, number):
    fail_at(monkeypatch, os, "fsync", 1, OSError(number, os.strerror(number)))
    with pytest.raises(UserError) as raised:
        saved.save_checkpoint(3, tensors(3))
    assert str(saved.checkpoints) in one_line(raised.value)
    assert left_overs(saved) == []
    assert_holds(saved.load_checkpoint()[0], 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: only Linux has a disk that is always full")
def test_a_disk_that_is_really_full_leaves_the_old_file(run, monkeypatch):
    def full_open(path, mode, **how):
        return builtins.open("/dev/full" if mode in ("xb", "ab") else path, mode.replace("x", "w"), buffering=0)

    log = run.metrics_log(None)
    log.restore()
    run.write_evaluation(evaluation(1.0))
    before = hashes(run.path)
    monkeypatch.setattr(files, "open", full_open, raising=False)
    for write in (lambda: run.write_evaluation(evaluation(2.0)), lambda: log.append({"step": 1})):
        with pytest.raises(UserError, match="no space is left") as raised:
            write()
        assert str(run.path) in one_line(raised.value)
    monkeypatch.undo()
    assert hashes(run.path) == before
    assert run.evaluation == evaluation(1.0)


def test_a_full_disk_at_the_end_does_not_make_a_finished_run(saved, monkeypatch):
    write_json(saved.path / "tokenizer.json", {"kind": "byte"})
    weights = {"w": np.zeros(3, np.float32)}
    for fault in (1, 2):  # the weights, then the manifest
        with monkeypatch.context() as patch:
            fail_at(patch, os, "replace", fault, FULL)
            with pytest.raises(UserError, match="no space is left"):
                saved.finish(weights)
        assert not saved.finished
        assert_holds(saved.load_checkpoint()[0], 2)
        assert left_overs(saved) == []
    saved.finish(weights)
    assert saved.finished


# --- the run folder ---------------------------------------------------------------------------------------------------


def test_a_new_run_holds_its_config(run):
    assert json.loads((run.path / "config.json").read_text()) == to_dict(CONFIG)
    assert run.config == CONFIG
    assert Run.open(run.path).config == CONFIG
    assert run.name == "run"
    assert not run.finished
    assert (run.evaluation, run.env, run.metrics()) == (None, None, [])


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_folder_will_do_with_and_without_resume(tmp_path, resume):
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path / "empty", CONFIG, resume=resume).config == CONFIG
    assert Run.create(tmp_path / "new" / "and" / "deep", CONFIG, resume=resume).config == CONFIG


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_someone_elses_is_refused_and_left_alone(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = hashes(tmp_path)
    with pytest.raises(UserError) as raised:
        Run.create(tmp_path, CONFIG, resume=resume)
    message = one_line(raised.value)
    assert "thesis.tex" in message
    assert "choose another" in message
    assert hashes(tmp_path) == before


def test_an_existing_run_needs_resume(saved):
    before = hashes(saved.path)
    with pytest.raises(UserError) as raised:
        Run.create(saved.path, CONFIG, resume=False)
    assert "--resume" in one_line(raised.value)
    assert hashes(saved.path) == before
    assert_holds(Run.create(saved.path, CONFIG, resume=True).load_checkpoint()[0], 2)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(CONFIG, train=TrainConfig(steps=10)), "train.steps is 9, not 10"),
        (replace(CONFIG, train=TrainConfig(steps=9, lr=0.5, seed=3)), "train.lr is 0.0003, not 0.5"),
        (replace(CONFIG, method=DenseConfig()), "method.name is 'tsa', not 'dense'"),
        (replace(CONFIG, method=TSAConfig(threshold=0.25)), "method.threshold is 0.5, not 0.25"),
    ],
)
def test_a_run_of_another_config_is_refused_with_the_first_difference(saved, other, difference):
    before = hashes(saved.path)
    with pytest.raises(UserError) as raised:
        Run.create(saved.path, other, resume=True)
    message = one_line(raised.value)
    assert difference in message
    assert message.count(" is ") == 1
    assert hashes(saved.path) == before


def test_left_overs_of_a_killed_process_are_removed(saved):
    (saved.checkpoints / ".tmp-00000003-4711").mkdir()
    (saved.checkpoints / ".tmp-00000003-4711" / STATE).write_bytes(b"half")
    (saved.path / ".tmp-metrics.jsonl-4711").write_bytes(b"half")
    (saved.checkpoints / ".tmp-metrics.jsonl-4711").write_bytes(b"half")
    assert len(left_overs(saved)) == 4
    run = Run.create(saved.path, CONFIG, resume=True)
    assert left_overs(run) == []
    assert_holds(run.load_checkpoint()[0], 2)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_folder_that_could_not_be_made_to_the_end_can_be_tried_again(tmp_path, call, resume):
    """At every call: the second try does not take what the first one left for a foreign folder."""
    faults = 0
    while True:
        path = tmp_path / str(faults)
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, os, call, faults + 1, FULL)
            try:
                Run.create(path, CONFIG, resume=resume)
            except UserError as error:
                message = one_line(error)
            else:
                break
        faults += 1
        assert "no space is left" in message
        # Once config.json exists it is a run, which is resumed; before, it is an empty folder.
        again = Run.create(path, CONFIG, resume=resume or (path / "config.json").exists())
        assert again.config == CONFIG
    assert faults >= 1, f"creating a run never calls os.{call}"


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError) as raised:
            Run.create(path, CONFIG, resume=True)
        message = one_line(raised.value)
        assert str(path) in message
        assert "choose another" in message
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_read_only_place_is_one_line(tmp_path, monkeypatch, number):
    # Simulated, because root can write to every folder.
    fail_at(monkeypatch, os, "mkdir", 1, OSError(number, os.strerror(number)))
    with pytest.raises(UserError) as raised:
        Run.create(tmp_path / "run", CONFIG, resume=False)
    message = one_line(raised.value)
    assert str(tmp_path / "run") in message
    assert "choose another" in message


def test_a_name_that_no_file_system_takes_is_one_line(tmp_path):
    with pytest.raises(UserError) as raised:
        Run.create(tmp_path / ("x" * 300), CONFIG, resume=False)
    one_line(raised.value)


def test_opening_what_is_no_run_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(UserError) as raised:
            Run.open(path)
        assert str(path) in one_line(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged"),
        (b'{"version": 1', "damaged"),
        (b"[]", "JSON object"),
        (json.dumps({**to_dict(CONFIG), "version": 3}).encode(), "upgrade tokendepth"),
        (json.dumps({**to_dict(CONFIG), "colour": "red"}).encode(), "colour"),
    ],
)
def test_a_damaged_or_newer_config_is_refused(saved, content, said):
    (saved.path / "config.json").write_bytes(content)
    before = hashes(saved.path)
    for read in (lambda: saved.config, lambda: Run.create(saved.path, CONFIG, resume=True)):
        with pytest.raises(UserError) as raised:
            read()
        message = one_line(raised.value)
        assert said in message
        assert str(saved.path / "config.json") in message
    assert hashes(saved.path) == before


# --- the finished run -------------------------------------------------------------------------------------------------


def test_a_finished_run_gives_its_weights_and_has_no_checkpoints(finished):
    assert finished.finished
    assert not finished.checkpoints.exists()
    np.testing.assert_array_equal(finished.weights()["w"], np.arange(12, dtype=np.float32).reshape(3, 4))
    manifest = json.loads((finished.path / MANIFEST).read_text())
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert manifest["step"] == CONFIG.train.steps


def test_a_run_that_is_not_finished_has_no_weights(saved):
    with pytest.raises(UserError) as raised:
        saved.weights()
    message = one_line(raised.value)
    assert "not finished" in message
    assert "--resume" in message


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", MANIFEST])
def test_a_finished_run_that_was_changed_gives_no_weights(finished, name, kind):
    damage(finished.path / name, kind)
    with pytest.raises(UserError) as raised:
        finished.weights()
    message = one_line(raised.value)
    if not (name == MANIFEST and kind == "missing"):  # then it is an unfinished run
        assert str(finished.path / name) in message
    assert "--resume" in message or "restore" in message


def test_a_valid_but_other_value_in_a_finished_config_is_found(finished):
    edit_json(finished.path / "config.json", recipe="shakespeare.tsa")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        finished.weights()
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        _ = finished.config


def test_a_finished_run_of_a_newer_format_is_refused(finished):
    path = finished.path / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_bytes(sealed({**manifest, "version": 3}))
    with pytest.raises(UserError, match="format 3, newer than 2; upgrade tokendepth") as raised:
        finished.weights()
    one_line(raised.value)


def test_evaluation_and_env_come_back(run):
    run.write_evaluation(evaluation(1.5))
    assert run.evaluation == evaluation(1.5)
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.write_evaluation(evaluation(float("nan")))
    assert run.evaluation == evaluation(1.5)
    (run.path / "eval.json").write_text("{")
    with pytest.raises(UserError, match=r"eval\.json is damaged"):
        _ = run.evaluation
    write_json(run.path / "env.json", {"torch": "2"})
    assert run.env == {"torch": "2"}


def test_a_run_folder_holds_json_and_safetensors_only(saved):
    add_rows(saved, {"step": 1, "loss": 2.0})
    write_json(saved.path / "tokenizer.json", {"kind": "byte"})

    def check():
        files = [path for path in saved.path.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {".json", ".jsonl", ".safetensors"}
        for path in files:
            assert path.read_bytes()[:1] not in (b"\x80", b"P"), f"{path} begins like a pickle or a zip"

    check()
    saved.finish({"w": np.zeros(3, np.float32)})
    check()


# --- small files, copied into every checkpoint ------------------------------------------------------------------------


SMALL = {"config.json": b"{}", "env.json": b'{"a": 1}', "tokenizer.json": b"[]"}


def test_a_checkpoint_brings_back_the_small_files(run):
    run.save_checkpoint(1, tensors(1), {**SMALL, "env.json": b""})
    run.save_checkpoint(2, tensors(2), SMALL)
    checkpoint, _ = run.load_checkpoint()
    assert_holds(checkpoint, 2)
    assert checkpoint.files == SMALL
    damage(folder_of(run, 2) / STATE, "half")
    assert run.load_checkpoint()[0].files["env.json"] == b""


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", ["missing", "empty", "half", "middle flipped"])
def test_restoring_writes_what_is_not_as_it_should_be_and_names_it(run, name, kind):
    assert run.restore(SMALL) != []  # config.json was different
    assert run.restore(SMALL) == []
    damage(run.path / name, kind)
    (line,) = run.restore(SMALL)
    assert str(run.path / name) in line
    assert {name: (run.path / name).read_bytes() for name in SMALL} == SMALL


def test_restoring_on_a_full_disk_keeps_the_old_file(run, monkeypatch):
    run.restore(SMALL)
    damage(run.path / "env.json", "half")
    before = hashes(run.path)
    fail_at(monkeypatch, os, "replace", 1, FULL)
    with pytest.raises(UserError, match="no space is left"):
        run.restore(SMALL)
    assert hashes(run.path) == before


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_config_is_known_by_the_checkpoint(run, kind):
    run.save_checkpoint(1, tensors(1), {"config.json": (run.path / "config.json").read_bytes()})
    damage(run.path / "config.json", kind)
    other = replace(CONFIG, train=TrainConfig(steps=8))
    before = hashes(run.path)
    for config, resume in ((other, True), (other, False), (CONFIG, False)):
        with pytest.raises(UserError) as raised:
            Run.create(run.path, config, resume=resume)
        one_line(raised.value)
    assert hashes(run.path) == before
    files = Run.create(run.path, CONFIG, resume=True).load_checkpoint()[0].files
    assert len(run.restore(files)) == 1
    assert run.config == CONFIG


@pytest.mark.parametrize("known", ["all", "before there was a recipe"])
def test_a_config_with_another_valid_value_is_known_by_the_checkpoint_too(run, known):
    tree = to_dict(CONFIG)
    if known != "all":
        del tree["recipe"]
    run.save_checkpoint(1, tensors(1), {"config.json": json.dumps(tree).encode()})
    edit_json(run.path / "config.json", recipe="another")
    assert Run.create(run.path, CONFIG, resume=True).load_checkpoint()[0] is not None


# --- in a finished run every change is detected -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["config.json", "env.json", "metrics.jsonl"])
def test_a_finished_runs_small_files_are_read_only_as_they_were(saved, name, kind):
    write_json(saved.path / "tokenizer.json", {"kind": "byte"})
    write_json(saved.path / "env.json", {"corpus_sha256": "1"})
    add_rows(saved, *({"step": step, "loss": step / 3} for step in (1, 2, 3)))
    saved.finish({"w": np.zeros(3, np.float32)})
    read = {"config.json": lambda: saved.config, "env.json": lambda: saved.env, "metrics.jsonl": saved.metrics}[name]
    assert read()
    damage(saved.path / name, kind)
    for use in (read, saved.weights):
        with pytest.raises(UserError) as raised:
            use()
        message = one_line(raised.value)
        assert str(saved.path / name) in message
        assert "restore it from a copy" in message


def test_a_finished_run_of_which_the_manifest_lists_the_model_only_is_read(finished):
    """As in the first versions; the rest is then not compared."""
    write_manifest(finished.path, ("config.json", "tokenizer.json", "model.safetensors"), 9)
    add_rows(finished, {"step": 1})
    assert finished.metrics() == [{"step": 1}]
    assert list(finished.weights()) == ["w"]


@pytest.mark.parametrize("env", [{}, [], {"corpus": "x"}])
def test_an_env_that_names_no_corpus_is_damaged(run, env):
    run.check_corpus("f" * 64)  # not started, so there is nothing to compare
    write_json(run.path / "env.json", {"corpus_sha256": "f" * 64})
    run.check_corpus("f" * 64)
    write_json(run.path / "env.json", env)
    with pytest.raises(UserError, match=r"env\.json is damaged"):
        run.check_corpus("f" * 64)
