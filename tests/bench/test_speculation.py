"""The benchmark of self-speculation: rates, costs and the formula's speedup belong together."""

import pytest

from tests.tiny import tiny
from tokendepth.bench.speculation import speculative_timing
from tokendepth.config import BudgetConfig
from tokendepth.infer.drafting import speedup
from tokendepth.training.loop import train


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_what_is_told_of_speculation(tmp_path, temperature):
    run = train(tiny(tmp_path, BudgetConfig(budget=0.5), steps=1, n_layer=4), tmp_path / "run", show=False)
    row = speculative_timing(
        run, ["green", "on the "], tokens=8, share=0.0, budget=1.0, temperature=temperature, repeats=1, device="cpu"
    )
    assert row["tokens"] == 16
    assert 0 <= row["acceptance"] <= 1
    assert 0 < row["draft_cost_by_weights"] < 1 == row["verify_cost_by_weights"]
    assert min(*row["plain_tokens_per_s"], *row["speculation_tokens_per_s"], *row["speedup"]) > 0
    costs = row["draft_cost_by_weights"], row["verify_cost_by_weights"]
    assert row["formula_by_weights"] == pytest.approx(speedup(row["acceptance"], row["draft_length"], *costs))
    costs = row["draft_ms"] / row["plain_step_ms"], row["verify_ms"] / row["plain_step_ms"]
    assert row["formula_by_time"] == pytest.approx(speedup(row["acceptance"], row["draft_length"], *costs))
    assert row["tokens_that_differ"] == row["unexplained"] == 0
    assert {"device", "torch", "commit"} <= set(row)
