"""bench forward: it does not time wrong results, and its rows are consistent."""

import json

import pytest
import torch

from tests.tiny import tiny
from tokendepth.bench import forward
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DenseConfig, ModelConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import evaluate
from tokendepth.runs.results import read_rows
from tokendepth.training.loop import train

SMALL = {"paper": forward.Shape(ModelConfig(32, 3, 4, 64, 16, 0.0, 11), (1, 2))}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Small shapes, few repeats, no compiler, a separate cache."""
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(forward, "SHAPES", SMALL)
    monkeypatch.setattr(forward, "REPEATS", {})
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


def test_rows_add_up(tmp_path):
    rows = list(forward.measure("cpu", tmp_path, (0.0, 0.5, 1.0)))
    assert [(row["batch"], row["asked"]) for row in rows] == [(b, f) for b in (1, 2) for f in (0.0, 0.5, 1.0)]
    assert read_rows(tmp_path / "forward.json") == rows
    for row in rows:
        assert row["speedup"] == row["dense_ms"][0] / row["sparse_ms"][0]
        assert row["ceiling"] == pytest.approx(1 / (1 - row["flops_skipped"]))
        assert row["asked"] == pytest.approx(row["active_fraction"], abs=0.3)
        chosen = row["sparse_ms"] if row["auto"] == "sparse" else row["hard_ms"]
        assert row["auto_over_hard"] == row["hard_ms"][0] / chosen[0]
        if row["efficiency"] is not None:
            assert row["efficiency"] == pytest.approx((row["speedup"] - 1) / (row["ceiling"] - 1))
    assert rows[2]["ceiling"] < 1, "routers cost, and all tokens are active"
    assert rows[2]["efficiency"] is None


def test_the_same_again_replaces_its_row(tmp_path):
    for _ in range(2):
        list(forward.measure("cpu", tmp_path, (0.5,)))
    assert len(read_rows(tmp_path / "forward.json")) == 2


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch):
    real = forward.LanguageModel.forward

    def wrong(self, ids, *, execution="soft", **options):
        out = real(self, ids, execution=execution, **options)
        return forward.Output(out.logits * 1.01, out.trace, out.losses) if execution == "sparse" else out

    monkeypatch.setattr(forward.LanguageModel, "forward", wrong)
    with pytest.raises(UserError, match="sparse differs from hard"):
        list(forward.measure("cpu", tmp_path, (0.5,)))
    assert not (tmp_path / "forward.json").exists()


def evaluated(tmp_path, method, *, curve=False):
    run = train(tiny(tmp_path, method=method), tmp_path / "run", show=False)
    run.write_evaluation(evaluate(run, timing=False, curve=curve))
    return run


def timed(run, tmp_path, capsys, *words: str) -> list[dict]:
    main(["bench", "forward", "--run", str(run.path), "--device", "cpu", "--out", str(tmp_path), "--json", *words])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_a_run_with_a_dial_is_timed_at_several_budgets(tmp_path, capsys):
    run = evaluated(tmp_path, BudgetConfig(), curve=True)
    rows = timed(run, tmp_path, capsys)
    assert [(row["batch"], row["asked"]) for row in rows] == [(b, f) for b in (1, 2) for f in forward.BUDGETS]
    for row in rows:
        (point,) = (point for point in run.evaluation["curve"] if point["budget"] == row["asked"])
        assert row["positions"] == "trained"
        assert row["execution"] == "sparse"
        assert (row["val_loss"], row["val_tlops_skipped"]) == (point["sparse"]["loss"], point["tlops_skipped"])
    most, *_, least = rows[: len(forward.BUDGETS)]
    assert most["active_fraction"] > least["active_fraction"]


def test_the_soft_gate_skips_nothing(tmp_path, capsys):
    run = evaluated(tmp_path, TSAConfig())
    sparse, soft = timed(run, tmp_path, capsys)[:2]
    assert (sparse["execution"], soft["execution"]) == ("sparse", "soft")
    assert soft["tlops_skipped"] == 0
    assert soft["flops_skipped"] < 0, "routers cost"
    assert soft["val_loss"] == run.evaluation["soft"]["loss"]
    assert sparse["val_loss"] == run.evaluation["sparse"]["loss"]


def test_a_dense_run_is_what_the_others_are_compared_with(tmp_path, capsys):
    (row, _) = timed(evaluated(tmp_path, DenseConfig()), tmp_path, capsys)
    assert (row["tlops_skipped"], row["ceiling"]) == (0, 1)


def test_batches_can_be_asked_for(tmp_path, capsys):
    run = evaluated(tmp_path, DenseConfig())
    assert [row["batch"] for row in timed(run, tmp_path, capsys, "--batches", "2")] == [2]
    with pytest.raises(SystemExit):
        timed(run, tmp_path, capsys, "--batches", "1000")
    assert "--batches asks for 1000 sequences" in capsys.readouterr().err


def test_a_run_without_its_figures_says_how_to_get_them(tmp_path, capsys):
    run = train(tiny(tmp_path, method=BudgetConfig()), tmp_path / "run", show=False)
    for _ in range(2):
        with pytest.raises(SystemExit):
            timed(run, tmp_path, capsys)
        assert f"tokendepth evaluate {run.path} --curve" in capsys.readouterr().err
        run.write_evaluation(evaluate(run, timing=False))


def test_at_full_activity_the_kernels_compute_the_dense_model():
    dense = forward.built(SMALL["paper"].model, DenseConfig(), torch.device("cpu"))
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(forward._at_full_activity(dense, ids), dense(ids).logits)


@pytest.mark.parametrize(
    "words",
    [
        ["--fractions", "0.5,1.2"],
        ["--fractions", "half"],
        ["--fractions", "nan"],
        ["--batches", "0"],
        ["--batches", "1,x"],
        ["--run", "/nowhere/at/all"],
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "forward", *words, "--device", "cpu", "--out", str(tmp_path)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words[1] in line
