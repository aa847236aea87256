"""Commands show what they do, their progress and the time left; stdout is only for results."""

import json
from pathlib import Path

import pytest
import torch

from tests.shown import Log, every_update
from tests.tiny import tiny
from tokendepth.bench import forward, processes, training
from tokendepth.cli.main import main
from tokendepth.config import METHOD_CONFIGS, BudgetConfig, ModelConfig
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import evaluate, has_curve
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

SHAPE = ModelConfig(32, 3, 4, 64, 16, 0.0, 11)


@pytest.fixture
def log(monkeypatch) -> Log:
    monkeypatch.setattr(calibrate, "FIRST_TOKENS", 1)
    return every_update(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return train(tiny(folder, BudgetConfig(), steps=1), folder / "run", show=False)


@pytest.fixture
def small(tmp_path, monkeypatch) -> None:
    """For bench: small shapes, few repeats, no compiler, a separate cache."""
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(forward, "SHAPES", {"paper": forward.Shape(SHAPE, (1, 2))})
    monkeypatch.setattr(forward, "REPEATS", {})
    monkeypatch.setattr(training, "PAPER_SHAPES", {"small": (SHAPE, 2)})
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


def test_evaluate(run, log, capsys):
    main(["evaluate", str(run.path), "--budget", "0.5", "--json", "--device", "cpu"])
    assert json.loads(capsys.readouterr().out)["budget"] == 0.5, "stdout is one JSON object"
    log.check_told(f"evaluating {run.path}", "tokens")
    log.check_told("finding thresholds for budget 0.5", "block passes")
    for note in ("hard", "sparse", "random decisions hard", "untrained router soft", "timing"):
        assert any(f", {note}, " in line for line in log.about("evaluating")), note


@pytest.mark.parametrize("method", METHOD_CONFIGS)
def test_an_evaluation_counts_what_it_is_going_to_do(method, tmp_path, log):
    """For every method, with its curve and all controls."""
    run = train(tiny(tmp_path, METHOD_CONFIGS[method](), steps=1, n_layer=4), tmp_path / "run", show=False)
    evaluate(run, timing=False, curve=has_curve(run.config), tokens=64, device="cpu", show=True)
    log.check_told("evaluating", "tokens")


def test_an_evaluation_is_quiet_where_nobody_asked(run, log):
    evaluate(run, timing=False, device="cpu")
    assert log.file.getvalue() == ""


def test_calibrate(run, log):
    main(["calibrate", str(run.path), "--budget", "0.7"])
    log.about(f"reading {run.path} and its corpus")
    log.check_told("finding thresholds for budget 0.7", "block passes")


def test_generate(run, log):
    main(["generate", str(run.path), "--budget", "0.3", "--tokens", "2"])
    log.about("reading the corpus")
    log.check_told("finding thresholds for budget 0.3", "block passes")


def test_describe_and_doctor(log, capsys):
    main(["describe", "demo.tsa", "--json"])
    assert json.loads(capsys.readouterr().out)["parameters"] > 0
    log.about("describing demo.tsa")
    main(["doctor"])
    log.about("checking the installation")


@pytest.mark.usefixtures("small")
def test_bench_forward(tmp_path, log, capsys):
    main(["bench", "forward", "--fractions", "0.5,1", "--device", "cpu", "--out", str(tmp_path), "--json"])
    assert [json.loads(line)["batch"] for line in capsys.readouterr().out.splitlines()] == [1, 1, 2, 2]
    log.check_told("bench forward", "batch sizes")
    for batch in (1, 2):
        log.check_told(f"paper, batch {batch}: compiling and checking", "fractions")
        log.check_told(f"paper, batch {batch}: timing", "rounds")


@pytest.mark.usefixtures("small")
def test_bench_training(tmp_path, log, capsys):
    main(["bench", "training", "--device", "cpu", "--out", str(tmp_path)])
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2
    log.check_told("bench training: steps:", "shapes")
    log.check_told("bench training: steps that skip:", "shapes")
    log.check_told("small: timing dense, tsa, early_exit", "rounds")


def test_bench_in_several_processes(tmp_path, log, monkeypatch):
    row = {"shape": "paper", "batch": 1, "asked": 0.5, "execution": "sparse", "speedup": 1.0, "commit": "c"}
    same = {"benchmark": "forward", "positions": "random", "dtype": "float32", "device": "CPU"}
    monkeypatch.setattr(processes, "_measured", lambda words: [row | same])
    list(processes.measure([], 3, Path(tmp_path)))
    log.check_told("bench forward", "processes")
