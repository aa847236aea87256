"""DepthTrace against numbers worked out by hand and against those the paper prints."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.config import ModelConfig, RunConfig, TSAConfig
from tokendepth.methods import build
from tokendepth.trace import EXECUTIONS, DepthTotals, DepthTrace, Site, add_up

STEM = Site("stem", routed=False, always=10, active=100)
GATED = Site("gated", routed=True, always=10, active=100, router=3)
LAYERS = 6

# Every pair of alpha and "TLOps saved" (in percent) that the paper's tables print.
PAPER = {
    "synthetic": [(0.341, 54.9), (0.730, 22.5)],
    "language": [(0.726, 22.8)],
    "enwik8": [(0.833, 13.9)],
    "penalty sweep": [
        *[(1.000, 0.0), (0.755, 20.4), (0.747, 21.1), (0.702, 24.8), (0.659, 28.4), (0.395, 50.4)],
        *[(0.260, 61.7), (0.036, 80.3)],
    ],
    "matched fraction": [(0.726, 22.8), (0.728, 22.7)],
    "wall clock": [(0.726, 22.8), (0.833, 13.9)],
    "wall clock, all": [
        *[(0.100, 75.0), (0.200, 66.7), (0.300, 58.3), (0.400, 50.0), (0.500, 41.7), (0.600, 33.3), (0.700, 25.0)],
        *[(0.726, 22.8), (0.800, 16.7), (0.833, 13.9), (0.900, 8.3), (1.000, 0.0)],
    ],
    # An early exit's alpha contains the stem already and the paper adds it again: its savings are not those executed,
    # but what it printed does follow from its formula.
    "early exit": [
        *[(0.933, 5.6), (0.864, 11.3), (0.820, 15.0), (0.785, 17.9), (0.756, 20.3), (0.728, 22.7), (0.700, 25.0)],
        *[(0.673, 27.3), (0.644, 29.7), (0.615, 32.0), (0.585, 34.6), (0.523, 39.8), (0.462, 44.9)],
    ],
}


def with_active_fraction(alpha: float) -> DepthTotals:
    """Six blocks and a thousand tokens; every routed block processes the first 1000 alpha of them."""
    work = np.zeros((LAYERS, 1, 1000))
    work[0] = 1
    work[1:, :, : round(1000 * alpha)] = 1
    return DepthTrace(work, (STEM, *[GATED] * (LAYERS - 1)), "sparse").totals()


def three_sites(execution: str, **options) -> DepthTrace:
    """Two sequences of two tokens: the first routed site processes 1 of 4 tokens, the second 2 of 4."""
    work = torch.tensor([[[1.0, 1], [1, 1]], [[1, 0], [0, 0]], [[0, 1], [1, 0]]])
    return DepthTrace(work, (STEM, GATED, GATED), execution, **options)


def test_totals_by_hand():
    totals = three_sites("sparse", outside=7.0).totals()
    assert totals.routed == (False, True, True)
    assert totals.tokens == 4
    assert totals.work == (4, 1, 2)
    assert totals.per_site == [1, 0.25, 0.5]
    assert totals.active_fraction == pytest.approx(0.375)
    assert totals.tlops == 7
    assert totals.tlops_saved == pytest.approx(5 / 12)


def test_a_site_of_several_blocks_counts_them_all():
    """A stem and a site of three blocks that processes 1 of 4 tokens: 4 + 3 of 16 token-layer operations."""
    recursion = Site("recursion", routed=True, always=0, active=300, blocks=3)
    work = torch.tensor([[[1.0, 1, 1, 1]], [[0, 0, 1, 0]]])
    totals = DepthTrace(work, (STEM, recursion), "sparse").totals()
    assert totals.tlops == 7
    assert totals.tlops_saved == pytest.approx(9 / 16)
    assert totals.active_fraction == 0.25


def test_flops_by_hand():
    # Every token: 7 outside, 10 at each of three sites, 3 at each of two routers. An active one: 100 at its site.
    always = 4 * (7 + 30 + 6)
    dense = 4 * (7 + 330)
    sparse, hard, soft = (three_sites(execution, outside=7.0).totals() for execution in ("sparse", "hard", "soft"))
    assert sparse.flops == always + 100 * (4 + 1 + 2)
    assert hard.flops == soft.flops == always + 100 * (4 + 4 + 4), "soft and hard compute every layer"
    assert sparse.flops_dense == hard.flops_dense == soft.flops_dense == dense
    assert sparse.flops_skipped == pytest.approx(1 - 872 / 1348)
    assert hard.flops_skipped == pytest.approx(-24 / 1348), "nothing is skipped and the routers come on top"


def test_packed_rows_by_hand():
    """Two sequences with 2 and 1 active tokens: their rows had 2 and 3 keys fewer, which cost 5 each."""
    packing = Site("packing", routed=True, always=0, active=100, per_key=5)
    work = torch.tensor([[[1.0, 1, 1], [1, 1, 1]], [[1, 1, 0], [0, 0, 1]]])
    trace = DepthTrace(work, (STEM, packing), "sparse", fewer_keys=torch.tensor([[0, 0], [2, 3]]))
    totals = trace.totals()
    assert totals.narrower_rows == 5 * (2 * 2 + 1 * 3)
    assert totals.flops_full_rows == 6 * 110 + 3 * 100
    assert totals.flops == totals.flops_full_rows - 35
    assert totals.flops_dense == 6 * 210, "dense rows have all keys"
    assert (totals + totals).narrower_rows == 70
    hard = DepthTrace(work, (STEM, packing), "hard", fewer_keys=torch.tensor([[0, 0], [2, 3]])).totals()
    assert hard.flops == hard.flops_full_rows == 6 * 210, "which packs nothing"


def test_soft_work_is_a_weight():
    """What soft saves in TLOps it does not save in FLOPs."""
    totals = DepthTrace(torch.tensor([[[1.0, 1.0]], [[0.25, 0.5]]]), (STEM, GATED), "soft").totals()
    assert totals.active_fraction == 0.375
    assert totals.tlops_saved == pytest.approx(1 - (1 + 0.375) / 2)
    assert totals.flops == 2 * (110 + 110 + 3)


def test_nothing_routed_is_all_active():
    totals = DepthTrace(torch.ones(2, 3, 4), (STEM, STEM), "sparse").totals()
    assert totals.active_fraction == 1
    assert totals.tlops_saved == 0
    assert totals.flops_skipped == 0


def test_padding_is_neither_a_token_nor_work():
    valid = torch.tensor([[False, True], [True, True]])
    totals = three_sites("sparse", valid=valid).totals()
    assert totals.tokens == 3
    assert totals.work == (3, 0, 2), "the one active token of the second site is padding"
    assert totals.active_fraction == pytest.approx(1 / 3)
    assert totals.tlops == 5
    assert totals.tlops_saved == pytest.approx(1 - 5 / 9)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_mask_without_padding_changes_nothing(execution):
    everything = torch.ones(2, 2, dtype=torch.bool)
    assert (
        three_sites(execution, valid=everything, outside=7.0).totals() == three_sites(execution, outside=7.0).totals()
    )


@st.composite
def decided(draw):
    """Decisions of a random shape, with padding."""
    sites, batch, time = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    work = (rng.random((sites, batch, time)) < draw(st.floats(0, 1))).astype(np.float32)
    valid = rng.random((batch, time)) < 0.7
    valid[0, 0] = True
    return work, valid


@given(decided(), st.sampled_from(EXECUTIONS), st.booleans())
def test_numpy_and_torch_give_the_same(drawn, execution, padded):
    work, valid = drawn
    sites = (STEM, *[GATED] * (len(work) - 1))
    by_numpy = DepthTrace(work, sites, execution, 7.0, valid if padded else None).totals()
    by_torch = DepthTrace(
        torch.from_numpy(work), sites, execution, 7.0, torch.from_numpy(valid) if padded else None
    ).totals()
    assert by_numpy == by_torch
    assert [type(number) for number in by_torch.work] == [float] * len(work), "plain numbers, whatever came in"


@given(decided(), st.sampled_from(EXECUTIONS))
def test_totals_add_up(drawn, execution):
    """A batch in parts: the sums are those of the whole, and so is every fraction."""
    work, _ = drawn
    sites = (STEM, *[GATED] * (len(work) - 1))
    parts = [DepthTrace(work[:, b : b + 1], sites, execution, 7.0).totals() for b in range(work.shape[1])]
    whole = DepthTrace(work, sites, execution, 7.0).totals()
    assert add_up(parts) == whole


def test_parts_of_unequal_size_count_by_their_tokens():
    full, empty = np.ones((2, 1, 3)), np.array([[[1.0]], [[0.0]]])
    both = add_up([DepthTrace(work, (STEM, GATED), "sparse").totals() for work in (full, empty)])
    assert both.active_fraction == 0.75, "not 0.5, the mean of their fractions"


def test_traces_of_different_methods_do_not_add_up():
    one = DepthTrace(np.ones((1, 1, 1)), (STEM,), "soft").totals()
    other = DepthTrace(np.ones((1, 1, 1)), (GATED,), "soft").totals()
    with pytest.raises(AssertionError, match="different methods"):
        one + other


@pytest.mark.parametrize(("alpha", "percent"), sorted({pair for pairs in PAPER.values() for pair in pairs}))
def test_the_papers_alpha_gives_the_papers_tlops(alpha, percent):
    """To 0.1 point: alpha is printed to 0.001 (half of that is 0.04 points of Delta) and Delta to 0.1 (half: 0.05)."""
    totals = with_active_fraction(alpha)
    assert totals.active_fraction == pytest.approx(alpha, abs=1e-12)
    assert 100 * totals.tlops_saved == pytest.approx(percent, abs=0.1)
    assert totals.tlops_saved == pytest.approx(1 - (1 + (LAYERS - 1) * alpha) / LAYERS, abs=1e-12), "eq. 7"


def test_a_token_layer_operation_is_not_a_flop():
    """Shakespeare's shape, alpha 0.391: 50.8% of the TLOps are skipped and, K and V kept, about 41% of the FLOPs."""
    model = build(RunConfig(model=ModelConfig(vocab_size=65), method=TSAConfig()))
    work = np.ones((LAYERS, 1, 1000))
    work[1:, :, 391:] = 0
    totals = DepthTrace(work, model.method.sites(keys=128), "sparse").totals()
    assert 100 * totals.tlops_saved == pytest.approx(50.8, abs=0.1)
    assert 100 * totals.flops_skipped == pytest.approx(41, abs=0.5)
    # By hand, per token: each block 4 d^2 for K and V; Q and output 4 d^2, FFN 4 d d_ff, its attention row 4 T d.
    d, d_ff, keys = 256, 1024, 128
    active = 4 * d * d + 4 * d * d_ff + 4 * keys * d
    router = 2 * (d * 64 + 64)
    dense = 6 * (4 * d * d + active)
    assert totals.flops_dense == 1000 * dense
    assert totals.flops == 1000 * (dense + 5 * router) - 5 * 609 * active
