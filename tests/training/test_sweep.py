"""A grid of runs: nothing is done twice, failures do not stop other runs, and stopping loses nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import is_alive, trainer, wait_until
from tests.tiny import hashes, one_line, tiny
from tokendepth import recipes
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DenseConfig, RunConfig, from_dict
from tokendepth.errors import UserError
from tokendepth.recipes import recipe, variants
from tokendepth.runs.run import Run
from tokendepth.training import sweep as sweep_module
from tokendepth.training.pool import LocalPool
from tokendepth.training.sweep import _Sweep, sweep, train_and_evaluate


def test_a_cell_is_a_recipe_and_what_to_vary():
    found = variants("shakespeare.dense:model.n-layer=2,3:train.lr=0.01", seeds=2)
    assert list(found) == [
        "shakespeare.dense-n_layer=2-lr=0.01-seed0",
        "shakespeare.dense-n_layer=2-lr=0.01-seed1",
        "shakespeare.dense-n_layer=3-lr=0.01-seed0",
        "shakespeare.dense-n_layer=3-lr=0.01-seed1",
    ]
    last = found["shakespeare.dense-n_layer=3-lr=0.01-seed1"]
    assert (last.model.n_layer, last.train.lr, last.train.seed) == (3, 0.01, 1)
    assert last.model.d_ff == recipe("shakespeare.dense").model.d_ff
    (own_text,) = variants("demo.dense:data.corpus=text:a.txt:train.steps=2").values()
    assert (own_text.data.corpus, own_text.train.steps) == ("text:a.txt", 2)


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ("shakespeare.desne", "shakespeare.dense"),
        ("shakespeare.dense:model.n-layers=2", "n-layer"),
        ("shakespeare.dense:model.n-layer", "no such recipe"),
        ("shakespeare.dense:model.n-layer=", "OPTION=VALUE"),
        ("shakespeare.dense:model.n-layer=two", "whole number"),
        ("shakespeare.dense:method.budget=0.4", "method budget"),
    ],
)
def test_a_bad_cell_is_refused_in_one_line(cell, named):
    with pytest.raises(UserError) as error:
        variants(cell)
    assert named in one_line(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("demo.dense --seeds 0", "--seeds is 0; expected 1 or more"),
        ("demo.dense --seeds -1", "--seeds is -1; expected 1 or more"),
        ("demo.dense --seeds 100000000", "100,000,000 runs; expected at most 10,000; use fewer --seeds"),
        ("demo.dense:model.n-layer=1,2 --seeds 5001", "10,002 runs"),
        ("demo.dense --seeds two", "--seeds"),
        ("demo.dense --workers 0", "--workers is 0; expected 1 or more"),
        ("demo.dense --workers -3", "--workers is -3; expected 1 or more"),
        ("demo.dense --on slurm", "--on is 'slurm'; expected local, ray or ray:HOST:PORT"),
        ("demo.dense --on ray:7", "--on is 'ray:7'; expected ray:HOST:PORT"),
    ],
)
def test_a_bad_option_is_refused_in_one_line_and_nothing_is_begun(words, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["sweep", *words.split(), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_the_largest_grid_is_not_refused(monkeypatch):
    monkeypatch.setattr(recipes, "LARGEST_GRID", 6)
    assert len(variants("demo.dense:model.n-layer=1,2", seeds=3)) == 6
    with pytest.raises(UserError, match="a grid of 8 runs; expected at most 6"):
        variants("demo.dense:model.n-layer=1,2", seeds=4)


def grid(folder: Path) -> dict[str, RunConfig]:
    dense = tiny(folder, method=DenseConfig(), steps=2)
    return {
        "dense": dense,
        "broken": replace(dense, data=replace(dense.data, corpus="text:/nowhere/at-all.txt")),
        "budget": replace(dense, method=BudgetConfig()),
    }


@pytest.mark.slow
def test_nothing_is_done_twice_and_a_failure_stops_nothing(tmp_path, monkeypatch):
    configs, out = grid(tmp_path), tmp_path / "sweep"
    heard: list[str] = []
    outcome = sweep(configs, out, workers=2, each=lambda run: heard.append(run.name), show=False)
    assert [run.name for run in outcome.runs] == ["dense", "budget"] == sorted(heard, reverse=True)
    assert all(run.finished and run.evaluation for run in outcome.runs)
    assert list(outcome.failed) == ["broken"]
    assert "/nowhere/at-all.txt" in outcome.failed["broken"]
    assert "Traceback" not in (out / "broken.log").read_text()

    kept = hashes(out / "dense")
    shutil.rmtree(out / "budget")
    configs.pop("broken")
    monkeypatch.setattr(sweep_module, "LocalPool", Here)
    again = sweep(configs, out, workers=2, show=False)
    assert [run.name for run in again.runs] == ["dense", "budget"]
    assert hashes(out / "dense") == kept
    started = time.perf_counter()
    monkeypatch.undo()
    assert not sweep(configs, out, show=False).failed
    assert time.perf_counter() - started < 2, "nothing left to do takes no process"


def test_after_the_deadline_nothing_is_begun(tmp_path):
    outcome = sweep(grid(tmp_path), tmp_path / "sweep", deadline=time.monotonic() - 1, show=False)
    assert (outcome.runs, outcome.failed, outcome.left) == ([], {}, ["dense", "broken", "budget"])
    assert not list((tmp_path / "sweep").iterdir())


@pytest.mark.slow
def test_at_the_deadline_what_runs_is_saved(tmp_path, monkeypatch):
    long = tiny(tmp_path, method=DenseConfig(), steps=100_000, log_every=100)
    out, heard = tmp_path / "sweep", []
    # However long a process takes to start, its time is up as soon as it trains.
    monkeypatch.setattr(
        _Sweep, "_late", lambda self: (out / "long" / "metrics.jsonl").exists() and Run(out / "long").metrics()
    )
    outcome = sweep({"long": long, "waiting": long}, out, each=lambda run: heard.append(run.name), show=False)
    assert (outcome.runs, outcome.failed, outcome.left, heard) == ([], {}, ["long", "waiting"], [])
    checkpoint, _ = Run(out / "long").load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step > 0
    assert not (out / "waiting").exists()


class Here(LocalPool):
    """Trains in this process, to test what a sweep decides, not who does the work."""

    def start(self, task, log):
        code = 0
        try:
            train_and_evaluate(from_dict(task.pop("config")), **task)
        except UserError as error:
            log.write_text(f"tokendepth: {error}")
            code = 1
        log.touch()
        return SimpleNamespace(poll=lambda: code, communicate=lambda: None)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(sweep_module, "LocalPool", Here)


def test_a_run_is_evaluated_on_the_split_that_is_asked_for(here, tmp_path):
    configs, out = {"dense": grid(tmp_path)["dense"]}, tmp_path / "sweep"
    for split in ("val", "test"):
        (run,) = sweep(configs, out, split=split, show=False).runs
        assert (run.evaluation or {})["split"] == split


def test_a_folder_of_another_config_is_a_failure_and_is_left_alone(here, tmp_path):
    configs, out = {"dense": grid(tmp_path)["dense"]}, tmp_path / "sweep"
    sweep(configs, out, show=False)
    kept = hashes(out / "dense")
    other = {"dense": replace(configs["dense"], train=replace(configs["dense"].train, lr=0.5))}
    outcome = sweep(other, out, show=False)
    assert "dense" in outcome.failed
    assert hashes(out / "dense") == kept


def long_sweep(folder: Path) -> tuple[subprocess.Popen, Run]:
    """A sweep in a separate process, whose only run has started to train."""
    cell = f"demo.dense:data.corpus={tiny(folder).data.corpus}:model.context=16:model.d-model=8:train.steps=4000"
    cell += ":train.checkpoint-every=4000"  # anything saved earlier is saved because of the stop
    words = [sys.executable, "-m", "tokendepth", "sweep", cell, "--seeds", "1", "--out", str(folder / "out")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    (name,) = variants(cell)
    metrics = folder / "out" / name / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_bytes()) > 200)
    return process, Run(metrics.parent)


def test_a_stopped_sweep_saves_its_runs_and_goes_on(tmp_path):
    process, run = long_sweep(tmp_path)
    worker = trainer(run)
    process.send_signal(signal.SIGINT)
    _, words_said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not is_alive(worker)
    assert words_said.splitlines()[-1].endswith(
        f"every run in {tmp_path / 'out'} is saved; repeat the command to continue"
    )
    checkpoint, _ = run.load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint.step < 4000


def test_a_killed_sweep_takes_its_runs_with_it(tmp_path):
    process, run = long_sweep(tmp_path)
    worker = trainer(run)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not is_alive(worker))
    checkpoint, _ = run.load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint.step < 4000, "it stopped, and saved what it had"


def test_the_command_trains_prints_and_collects(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep_module, "SILENCE_S", 0)
    corpus = tiny(tmp_path).data.corpus
    cell = f"demo.dense:data.corpus={corpus}:model.context=16:model.d-model=8:model.d-ff=8:train.steps=2"
    results = tmp_path / "rows.json"
    main(["sweep", cell, "--seeds", "1", "--out", str(tmp_path / "out"), "--results", str(results)])
    out, err = capsys.readouterr()
    assert "demo.dense" in out
    assert err.splitlines()[0].endswith("-seed0 starting"), "where there is no terminal, something is said all the time"
    assert results.exists()
    with pytest.raises(SystemExit) as stop:
        main(
            ["sweep", f"demo.dense:data.corpus=text:{tmp_path}/none.txt", "--seeds", "1", "--out", str(tmp_path / "x")]
        )
    assert stop.value.code == 1
    assert "none.txt" in capsys.readouterr().err


def test_a_curve_that_is_asked_for_later_is_added(here, tmp_path):
    configs, out = {"budget": grid(tmp_path)["budget"]}, tmp_path / "sweep"
    (plain,) = sweep(configs, out, show=False).runs
    assert (plain.evaluation or {})["curve"] == []
    weights = hashes(out / "budget")["model.safetensors"]
    (curved,) = sweep(configs, out, curve=True, show=False).runs
    assert (curved.evaluation or {})["curve"]
    assert hashes(out / "budget")["model.safetensors"] == weights, "trained once"
