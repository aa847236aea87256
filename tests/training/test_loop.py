"""Training: it learns, it logs what it did, and interruptions do not change the result."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.faults.stopped import stopped_run
from tests.tiny import TEXT, hashes, one_line, steady, tiny, write_corpus
from tokendepth.config import BudgetConfig, DenseConfig, RunConfig, TSAConfig, to_dict
from tokendepth.data import load, tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import build
from tokendepth.runs import run as runs_module
from tokendepth.runs.run import Run
from tokendepth.training import loop as train_module
from tokendepth.training.loop import _Training, train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
METHODS = {"dense": DenseConfig(), "tsa": TSAConfig(depth_penalty=0.1)}


class Stopped(Exception):
    """Stands in for anything that ends a process."""


def quiet(config: RunConfig, out: Path, *, resume: bool = False) -> Run:
    return train(config, out, resume=resume, show=False)


def weights(run: Run) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in run.weights().items()}


def assert_same_result(run: Run, undisturbed: Run) -> None:
    assert weights(run) == weights(undisturbed)
    assert steady(run.metrics()) == steady(undisturbed.metrics())
    assert hashes(run.path).keys() == hashes(undisturbed.path).keys()


def stop_at(patch: pytest.MonkeyPatch, step: int, where: str = "step") -> None:
    """Stop training before step number `step` is taken, or before its result is saved."""
    if where == "step":
        real = _Training._step

        def stopping(self, number):
            if number == step:
                raise Stopped
            real(self, number)

        patch.setattr(_Training, "_step", stopping)
    else:
        real_save = Run.save_checkpoint

        def not_saving(self, number, *rest):
            if number == step + 1:
                raise Stopped
            real_save(self, number, *rest)

        patch.setattr(Run, "save_checkpoint", not_saving)


# --- a run from beginning to end --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=METHODS)
def trained(request, tmp_path_factory) -> tuple[RunConfig, Run]:
    folder = tmp_path_factory.mktemp(request.param)
    config = tiny(folder, METHODS[request.param], steps=150, batch_size=8, eval_every=40, checkpoint_every=50)
    config = replace(config, train=replace(config.train, log_every=7))
    return config, quiet(config, folder / "run")


def test_it_learns_more_than_how_often_each_character_occurs(trained):
    config, run = trained
    dataset = load(config.data)
    first, last = (dataset.tokenizer.decode(dataset.split_ids(split)) for split in ("train", "val"))
    counts = Counter(first)
    missing = set(last) - set(counts)
    assert not missing
    unigram = -sum(math.log(counts[char] / len(first)) for char in last) / len(last)
    losses = [row["val_loss"] for row in run.metrics() if "val_loss" in row]
    assert unigram < math.log(dataset.tokenizer.vocab_size)
    assert losses[-1] < unigram / 2
    assert losses[-1] < losses[0]


def test_the_depth_penalty_is_learned(trained):
    config, run = trained
    rows = [row for row in run.metrics() if "loss" in row]
    if config.method == DenseConfig():
        assert {row["active_fraction"] for row in rows} == {1.0}
        assert {row["depth_loss"] for row in rows} == {0.0}
    else:
        assert rows[-1]["active_fraction"] < rows[0]["active_fraction"] - 0.1


def test_metrics_are_complete_and_in_order(trained):
    config, run = trained
    rows = run.metrics()
    logged, validated = ([row for row in rows if key in row] for key in ("loss", "val_loss"))
    assert len(rows) == len(logged) + len(validated)
    assert [row["step"] for row in logged] == [*range(7, 150, 7), 150]
    assert [row["step"] for row in validated] == [40, 80, 120, 150]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    names = {"step", "loss", "task_loss", "depth_loss", "active_fraction", "lr", "grad_norm", "tokens_per_s"}
    assert all(row.keys() == names | {"tokens", "tlops"} for row in logged)
    names = {"step", "val_loss", "val_bits_per_byte", "val_active_fraction", "tokens", "tlops"}
    assert all(row.keys() == names for row in validated)
    ratios = {row["val_bits_per_byte"] / row["val_loss"] for row in validated}
    assert max(ratios) - min(ratios) < 1e-9, "the same loss, in bits, over the bytes of a character"
    assert max(ratios) < 1 / math.log(2), "some characters of the corpus take several bytes"
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for row in rows:
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["tokens"] <= row["tlops"] <= 3 * row["tokens"]
    assert [row["tlops"] for row in rows] == sorted(row["tlops"] for row in rows)
    for row in logged:
        assert row["loss"] == row["task_loss"] + row["depth_loss"]
        assert row["tokens_per_s"] > 0
    if config.method != DenseConfig():
        for row in logged:
            assert row["depth_loss"] == pytest.approx(0.1 * row["active_fraction"], rel=1e-5)
    rates = [row["lr"] for row in logged]
    assert rates == sorted(rates, reverse=True)


def test_the_folder_says_what_was_trained_where_on_what(trained):
    config, run = trained
    dataset = load(config.data)
    assert sorted(hashes(run.path)) == [
        "MANIFEST.json", "config.json", "env.json", "metrics.jsonl", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    size = dataset.tokenizer.vocab_size
    assert run.config == replace(config, model=replace(config.model, vocab_size=size))
    assert run.env["torch"] == torch.__version__
    assert run.env["ranks"] == 1
    assert run.env["corpus_sha256"] == dataset.fingerprint
    assert tokenizer_from_dict(json.loads((run.path / "tokenizer.json").read_text())) == dataset.tokenizer


def test_the_weights_are_those_of_the_model(trained):
    _, run = trained
    model = load_model(run, torch.device("cpu"))
    assert {name: tuple(array.shape) for name, array in run.weights().items()} == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    initial = build(run.config).state_dict()
    assert all(not torch.equal(tensor, initial[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tensorboard", [False, True])
def test_resuming_a_finished_run_changes_nothing(tmp_path, tensorboard, capsys):
    """RELIABILITY 12: no file or folder changes or appears."""
    if tensorboard:
        pytest.importorskip("tensorboard")
    config = tiny(tmp_path, steps=2, tensorboard=tensorboard)
    run = quiet(config, tmp_path / "run")
    before = {**hashes(run.path), "times": [path.stat().st_mtime_ns for path in sorted(run.path.rglob("*"))]}
    again = train(config, run.path, resume=True)
    assert again == run
    assert {**hashes(run.path), "times": [path.stat().st_mtime_ns for path in sorted(run.path.rglob("*"))]} == before
    assert "already finished" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    config = tiny(tmp_path, dropout=0.1)
    one, two = (quiet(config, tmp_path / name) for name in ("one", "two"))
    assert_same_result(two, one)
    other = quiet(replace(config, train=replace(config.train, seed=1)), tmp_path / "other")
    assert weights(other) != weights(one)
    assert steady(other.metrics())[0]["loss"] != steady(one.metrics())[0]["loss"]


def test_accumulation_does_not_change_the_run(tmp_path):
    """Without dropout; up to the rounding that accumulates in a few steps."""
    runs = [quiet(tiny(tmp_path, accumulate=parts), tmp_path / str(parts)) for parts in (1, 2, 4)]
    for run in runs[1:]:
        for row, expected in zip(steady(run.metrics()), steady(runs[0].metrics()), strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def test_bfloat16_trains_and_keeps_its_weights_in_float32(tmp_path):
    run = quiet(tiny(tmp_path, dtype="bfloat16", lr=1e-3), tmp_path / "run")
    exact = quiet(tiny(tmp_path, dtype="float32", lr=1e-3), tmp_path / "exact")
    assert {array.dtype for array in run.weights().values()} == {np.dtype(np.float32)}
    for row, expected in zip(run.metrics(), exact.metrics(), strict=True):
        for name in ("loss", "val_loss"):
            if name in expected:
                assert row[name] != expected[name]
                assert row[name] == pytest.approx(expected[name], rel=2**-7)  # bfloat16 has eight bits of precision


def test_nothing_is_printed_where_nothing_is_to_be_shown(tmp_path, capfd):
    quiet(tiny(tmp_path), tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    train(tiny(tmp_path), tmp_path / "shown")
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "shown: training",
        "shown: step 4/8",
        "shown: step 8/8",
    ]


# --- stopping and resuming --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=METHODS)
def undisturbed(request, tmp_path_factory) -> tuple[RunConfig, Run]:
    """Eight steps with dropout, a checkpoint at each."""
    folder = tmp_path_factory.mktemp(f"undisturbed-{request.param}")
    config = tiny(folder, METHODS[request.param], steps=STEPS, dropout=0.1, checkpoint_every=1, eval_every=3)
    return config, quiet(config, folder / "run")


@pytest.mark.parametrize("where", ["step", "save"])
@pytest.mark.parametrize("step", range(STEPS))
def test_a_run_resumed_at_any_step_ends_bit_for_bit_the_same(undisturbed, step, where, tmp_path):
    """RELIABILITY 3."""
    config, expected = undisturbed
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step, where)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run")
    stopped = Run(tmp_path / "run")
    assert not stopped.finished
    checkpoint, skipped = stopped.load_checkpoint()
    assert skipped == []
    assert (checkpoint.step if checkpoint else 0) == step
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


def test_a_run_stopped_before_every_step_ends_the_same(undisturbed, tmp_path):
    config, expected = undisturbed
    for step in range(STEPS):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Stopped):
                quiet(config, tmp_path / "run", resume=True)
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_steps_after_the_last_checkpoint_are_taken_again(undisturbed, step, tmp_path):
    config, expected = undisturbed
    config = replace(config, train=replace(config.train, checkpoint_every=3))
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run")
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


def test_a_kill_while_finishing_is_gone_on_with(undisturbed, tmp_path):
    config, expected = undisturbed
    with pytest.MonkeyPatch.context() as patch:
        real = runs_module.write_manifest

        def stopped(folder, *rest):
            if folder == tmp_path / "run":
                raise Stopped
            real(folder, *rest)

        patch.setattr(runs_module, "write_manifest", stopped)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not Run(tmp_path / "run").finished
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


def test_resume_starts_afresh_where_nothing_is(undisturbed, tmp_path):
    config, expected = undisturbed
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        assert_same_result(quiet(config, tmp_path / name, resume=True), expected)


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_are_passed_over_in_one_line_each_and_the_end_is_the_same(
    undisturbed, damaged, tmp_path, capsys
):
    config, expected = undisturbed
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run")
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir(), reverse=True)[:damaged]
    for folder in folders:
        content = bytearray((folder / "state.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "state.safetensors").write_bytes(content)
    capsys.readouterr()
    assert_same_result(train(config, tmp_path / "run", resume=True), expected)
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "validation loss" not in line and ": training, " not in line
    ]
    assert len(lines) == damaged
    for line, folder in zip(lines, folders, strict=True):
        assert str(folder / "state.safetensors") in line


def test_a_run_that_lost_every_checkpoint_can_be_stopped_and_resumed_again(tmp_path):
    """It starts at step 0 and must keep what it saves, although the damaged checkpoints are from later steps."""
    config = tiny(tmp_path, checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run")
    for state in (tmp_path / "run" / "checkpoints").rglob("state.safetensors"):
        state.write_bytes(b"")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run", resume=True)
    checkpoint, _ = Run(tmp_path / "run").load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == 3


def test_a_full_disk_stops_the_run_with_one_line_and_it_can_be_resumed(undisturbed, tmp_path):
    config, expected = undisturbed
    real, calls = os.rename, []

    def full(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(UserError) as raised:
            quiet(config, tmp_path / "run")
    assert "no space is left" in one_line(raised.value)
    checkpoint, skipped = Run(tmp_path / "run").load_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, skipped) == (3, [])
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize("parameter", ["norm.weight", "method.blocks.1.ffn.up.bias", "embedding.weight"])
def test_nan_stops_the_run_and_no_checkpoint_holds_one(parameter, tmp_path):
    """RELIABILITY 11."""
    config = tiny(tmp_path, checkpoint_every=1)
    expected = quiet(config, tmp_path / "undisturbed")
    real = _Training._step

    def poisoned(self, number):
        if number == 5:
            dict(self.model.named_parameters())[parameter].data.fill_(math.nan)
        real(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Training, "_step", poisoned)
        with pytest.raises(UserError) as raised:
            quiet(config, tmp_path / "run")
    message = one_line(raised.value)
    assert "step 6" in message
    assert "loss nan" in message
    first, *_ = load(config.data).batch_ids(seed=0, step=5, batch_size=config.train.batch_size, context=16)
    assert f"(examples {first}, " in message, "what it was shown can be looked at"
    assert "--train.lr" in message
    run = Run(tmp_path / "run")
    assert not run.finished
    assert [row["step"] for row in run.metrics() if "loss" in row] == [1, 2, 3, 4, 5]
    checkpoint, skipped = run.load_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, skipped) == (5, [])
    assert all(np.isfinite(array).all() for array in checkpoint.tensors.values())
    assert len(list(run.checkpoints.glob("step-*"))) == 2
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


def test_no_file_of_a_run_is_a_pickle(tmp_path):
    def check():
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert len(files) > 5
        for path in files:
            assert path.suffix in (".json", ".jsonl", ".safetensors")
            if path.suffix == ".json":
                json.loads(path.read_text())

    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(Stopped):
            quiet(tiny(tmp_path), tmp_path / "run")
    check()
    quiet(tiny(tmp_path), tmp_path / "run", resume=True)
    check()


# --- what cannot be trained -------------------------------------------------------------------------------------------


def refused(config: RunConfig, out: Path, *, resume: bool = False) -> str:
    with pytest.raises(UserError) as raised:
        quiet(config, out, resume=resume)
    return one_line(raised.value)


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path):
    with pytest.raises(UserError) as raised:
        train_module._check_batch(tiny(tmp_path, batch_size=4, accumulate=2).train, world=4)
    message = one_line(raised.value)
    assert "train.batch_size is 4" in message
    assert "multiple of accumulate x ranks (8)" in message
    assert "--train.batch-size" in message


@pytest.mark.parametrize("what", ["seed", "corpus"])
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(what, tmp_path):
    """Its shapes and its manifest are right; only the run's files in it reveal the difference."""
    config = tiny(tmp_path)
    other = replace(config, train=replace(config.train, seed=1))
    if what == "corpus":  # with the same vocabulary, in the same place
        other = config
    run = stopped_run(config, tmp_path / "run", 5)
    if what == "corpus":
        write_corpus(tmp_path, TEXT[::-1])
    foreign = stopped_run(other, tmp_path / "foreign", 5)
    write_corpus(tmp_path)
    shutil.rmtree(run.checkpoints)
    shutil.copytree(foreign.checkpoints, run.checkpoints)
    before = hashes(run.path)
    message = refused(config, run.path, resume=True)
    assert "checkpoints/step-00000004 is of another run: " in message
    assert ("train.seed is 1, not 0" if what == "seed" else "had another content") in message
    assert "put the run's own checkpoint in its place" in message
    assert hashes(run.path) == before


def test_cuda_where_there_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refused(tiny(tmp_path, device="cuda"), tmp_path / "run")
    assert "set --train.device cpu" in message
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_not_the_corpuss_is_refused(tmp_path):
    message = refused(tiny(tmp_path, vocab_size=7), tmp_path / "run")
    assert "model.vocab_size is 7" in message
    assert f"has {len(set(TEXT))} tokens" in message
    assert not (tmp_path / "run").exists()
    given = quiet(tiny(tmp_path, vocab_size=len(set(TEXT)), steps=1), tmp_path / "right")
    assert given.config.model.vocab_size == len(set(TEXT))


def test_a_context_longer_than_the_corpus_is_refused(tmp_path):
    message = refused(tiny(tmp_path, context=5000), tmp_path / "run")
    assert "model.context is 5000" in message
    assert "--model.context" in message
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_there_is_not_overwritten(tmp_path):
    config = tiny(tmp_path, steps=2)
    run = quiet(config, tmp_path / "run")
    before = hashes(run.path)
    assert "--resume" in refused(config, run.path)
    other = replace(config, train=replace(config.train, steps=3))
    assert "train.steps is 2, not 3" in refused(other, run.path, resume=True)
    assert hashes(run.path) == before


def test_a_corpus_that_was_edited_since_is_not_resumed_on(tmp_path):
    """The same characters, so the same vocabulary, but another text: the result would belong to neither run."""
    config = tiny(tmp_path, checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stopped):
            quiet(config, tmp_path / "run")
    write_corpus(tmp_path, TEXT[::-1])
    assert "corpus" in refused(config, tmp_path / "run", resume=True)


# --- signals, in this process -----------------------------------------------------------------------------------------


def test_the_handlers_of_before_are_back_afterwards(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Training, "_step", lambda self, step: seen.append([signal.getsignal(n) for n in numbers]))
        patch.setattr(Run, "finish", lambda *args: None)
        quiet(tiny(tmp_path, steps=1), tmp_path / "run")
    assert seen[0] != before
    assert [signal.getsignal(number) for number in numbers] == before
    refused(tiny(tmp_path, vocab_size=7), tmp_path / "other")
    assert [signal.getsignal(number) for number in numbers] == before


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_events_are_written_by_the_end(tmp_path):
    pytest.importorskip("tensorboard")
    run = quiet(tiny(tmp_path, tensorboard=True), tmp_path / "run")
    (events,) = (run.path / "tensorboard").iterdir()
    content = events.read_bytes()
    for name in (b"task_loss", b"active_fraction", b"val_loss", b"tokens_per_s"):
        assert name in content


@pytest.mark.parametrize("stopped", [False, True])
def test_the_tensorboard_writer_is_closed_however_the_run_ends(tmp_path, stopped):
    """It writes in a thread that ends with the process: without closing it, the last rows may be lost."""
    pytest.importorskip("tensorboard")
    from torch.utils import tensorboard

    closed = []

    class Watched(tensorboard.SummaryWriter):
        def close(self):
            closed.append(self)
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorboard, "SummaryWriter", Watched)
        if stopped:
            stop_at(patch, 4)
        with pytest.raises(Stopped) if stopped else contextlib.nullcontext():
            quiet(tiny(tmp_path, tensorboard=True), tmp_path / "run")
    assert len(closed) >= 1


def test_without_tensorboard_one_line_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    message = refused(tiny(tmp_path, tensorboard=True), tmp_path / "run")
    assert "tokendepth[tensorboard]" in message


def test_a_run_refused_for_want_of_tensorboard_leaves_the_folder_free(tmp_path, monkeypatch):
    """After the remedy (installing it, or dropping the flag), the same --out must work without --resume."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        refused(tiny(tmp_path, tensorboard=True), tmp_path / "run")
    assert quiet(tiny(tmp_path, steps=1), tmp_path / "run").finished


# --- ranks ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tokendepth.config import from_dict
from tokendepth.training.loop import train
for name, tree in json.loads(Path(sys.argv[1]).read_text()).items():
    train(from_dict(tree), Path(sys.argv[2]) / name, show=False)
"""


def test_two_ranks_train_as_one_does_on_the_same_global_batch(tmp_path):
    configs = {
        name: tiny(tmp_path, method, steps=20, eval_every=10, lr=3e-3, dropout=0.0) for name, method in METHODS.items()
    }
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "configs.json").write_text(json.dumps({name: to_dict(config) for name, config in configs.items()}))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [tmp_path / "script.py", tmp_path / "configs.json", tmp_path / "two"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, *map(str, arguments)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for name, config in configs.items():
        one, two = quiet(config, tmp_path / "one" / name), Run.open(tmp_path / "two" / name)
        assert two.finished
        assert two.env["ranks"] == 2
        assert len(one.metrics()) == 22
        for row, expected in zip(steady(two.metrics()), steady(one.metrics()), strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
        assert hashes(two.path).keys() == hashes(one.path).keys()
    assert train_module.Ranks().world == 1


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "tokendepth", "train", "demo.dense", "--out", "run", "--data.corpus", "text:nowhere.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("tokendepth: ")]
    assert len(said) == 1, done.stderr
    assert "nowhere.txt" in said[0]
    assert str(ROOT / "tokendepth") not in done.stderr, "torchrun has a traceback of its own, we have none"
    assert not (tmp_path / "run").exists()


# --- the small files --------------------------------------------------------------------------------------------------


def test_files_that_rot_while_a_run_trains_are_sealed_as_they_should_be(tmp_path, capsys):
    """The manifest of a finished run must not vouch for a damaged file, nor fail because one is missing."""
    config = tiny(tmp_path)
    expected = quiet(config, tmp_path / "undisturbed")
    real = _Training._step

    def rotting(self, number):
        if number == 6:
            (tmp_path / "run" / "tokenizer.json").unlink()
            (tmp_path / "run" / "config.json").write_bytes(b"{}")
            (tmp_path / "run" / "metrics.jsonl").write_bytes(b"rot\n")
        real(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Training, "_step", rotting)
        run = train(config, tmp_path / "run")
    assert_same_result(run, expected)
    lines = [line for line in capsys.readouterr().err.splitlines() if "restored" in line]
    assert [Path(line.split()[0]).name for line in lines] == ["config.json", "tokenizer.json", "metrics.jsonl"]


def test_a_finished_run_that_was_damaged_is_not_called_finished(tmp_path):
    config = tiny(tmp_path, steps=2)
    run = quiet(config, tmp_path / "run")
    content = bytearray((run.path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run.path / "model.safetensors").write_bytes(content)
    message = refused(config, run.path, resume=True)
    assert str(run.path / "model.safetensors") in message
    assert "restore" in message


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    """Not even if the damage happens between the update and the checkpoint."""
    config = tiny(tmp_path, checkpoint_every=1)
    expected = quiet(config, tmp_path / "undisturbed")
    real = _Training._save

    def poisoned(self, step):
        if step == 5:
            self.optimiser_step.adam.state[self.optimiser_step.adam.param_groups[0]["params"][0]]["exp_avg"][3] = (
                math.inf
            )
        real(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Training, "_save", poisoned)
        message = refused(config, tmp_path / "run")
    assert "step 5: exp_avg." in message
    assert "--resume" in message
    assert Run(tmp_path / "run").load_checkpoint()[0].step == 4
    assert_same_result(quiet(config, tmp_path / "run", resume=True), expected)


def test_a_model_without_its_manifest_is_trained_again_and_not_in_silence(tmp_path, capsys):
    config = tiny(tmp_path, steps=2)
    run = quiet(config, tmp_path / "run")
    expected = weights(run)
    (run.path / "MANIFEST.json").unlink()
    assert weights(train(config, run.path, resume=True)) == expected
    assert "model.safetensors has lost its manifest; it is kept as" in capsys.readouterr().err
    assert (run.path / "model.unverified.safetensors").exists()


# --- what depends on how a batch is split -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "accumulate", "said"),
    [(BudgetConfig(), 2, True), (BudgetConfig(), 1, False), (TSAConfig(), 2, False)],
    ids=["budget in two", "budget whole", "tsa in two"],
)
def test_a_statistic_over_parts_of_a_batch_is_said_and_kept(method, accumulate, said, tmp_path, capsys):
    run = train(tiny(tmp_path, method, steps=2, accumulate=accumulate), tmp_path / "run")
    line = "budget computes the quantile of the routers' scores"
    assert (line in " ".join(capsys.readouterr().err.split())) == said
    assert ("taken_over_each_part" in run.env) == said
    if said:
        assert run.env["parts_of_a_batch"] == 2
