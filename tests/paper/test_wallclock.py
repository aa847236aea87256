"""The paper's timing protocol in miniature: which tokens are active, what is timed, and resuming a stopped sweep."""

import pytest
import torch

from paper.wallclock import (
    BATCHES,
    FRACTIONS,
    Condition,
    Protocol,
    _decisions,
    batch_scaling,
    fraction_sweep,
    measure,
)
from tests.shown import every_update
from tokendepth.config import ModelConfig
from tokendepth.runs.results import read_rows

TINY = Protocol(ModelConfig(16, 3, 2, 32, 20, 0.0, 11), 2, (0.25, 1.0), (1, 3), warm_up=1, passes=3)


def test_the_paper_takes_twelve_fractions_and_five_batches():
    assert (len(FRACTIONS), BATCHES) == (12, (1, 8, 32, 64, 128))
    assert (Protocol().warm_up, Protocol().passes) == (30, 200)
    swept = fraction_sweep(Protocol())
    assert len(swept) == 1 + 12 * 4
    assert {condition.batch for condition in swept} == {64}
    assert len(batch_scaling(Protocol())) == 5 * 4


@pytest.mark.parametrize("positions", ["contiguous", "random"])
def test_every_sequence_has_its_share_of_active_tokens(positions):
    condition = Condition(3, "sparse", 0.25, "ffn", positions)
    active = _decisions(condition, TINY, torch.Generator().manual_seed(0))
    assert active.shape == (2, 3, 20)
    assert (active.sum(-1) == 5).all()
    assert active[..., :5].all() == (positions == "contiguous")


def test_rows_are_written_one_by_one_and_not_taken_again(tmp_path):
    conditions = fraction_sweep(TINY)
    asked = iter([False, False, True])
    first = list(measure(conditions, TINY, tmp_path, "cpu", late=lambda: next(asked)))
    assert len(first) == 2 == len(read_rows(tmp_path / "wallclock.json"))
    rest = list(measure(conditions, TINY, tmp_path, "cpu"))
    assert len(first) + len(rest) == len(conditions)
    assert not list(measure(conditions, TINY, tmp_path, "cpu"))
    for row in read_rows(tmp_path / "wallclock.json"):
        assert row["speedup"] == pytest.approx(row["dense_ms"][0] / row["ms"][0])
        assert row["ms"][1] <= row["ms"][0] <= row["ms"][2]
        assert row["speedup_quartiles"][0] <= row["speedup_quartiles"][1]
        assert row["commit"]
        assert row["dtype"] == "float32"


def test_it_tells_how_far_it_is(tmp_path, monkeypatch):
    log = every_update(monkeypatch)
    list(measure(fraction_sweep(TINY)[:2], TINY, tmp_path, "cpu"))
    log.check_told("timing forward passes", "rounds")
