"""The arithmetic of self-speculation: acceptance keeps the distribution, the speedup formula, and draft lengths."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.test_contract import lively
from tokendepth.infer.drafting import (
    FIRST,
    LONGEST,
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    TRIED,
    Pace,
    Speculation,
    instead,
    keep_chance,
    speedup,
    verdict,
)
from tokendepth.infer.sampling import Sampler, Sampling, draw, probabilities
from tokendepth.trace import Site

# --- which tokens are kept --------------------------------------------------------------------------------------------

distribution = st.lists(st.integers(0, 1000), min_size=6, max_size=6).filter(any)


@given(full=distribution, draft=distribution)
def test_kept_and_replaced_tokens_together_have_the_full_models_distribution(full, draft):
    """Sum over all drafted tokens: the probability of keeping each, and of its replacements."""
    p, q = (torch.tensor([each]).double() / sum(each) for each in (full, draft))
    kept = keep_chance(p, q)
    left = instead(p, q)
    left = left / left.sum()
    total = torch.zeros(6).double()
    for token, chance in enumerate(q[0].tolist()):
        total[token] += chance * kept[0, token]
        total += chance * (1 - kept[0, token]) * left[0]
    assert torch.allclose(total, p[0], atol=1e-6, rtol=0)
    assert ((kept >= 0) & (kept <= 1)).all()


@pytest.mark.parametrize("ask", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7}])
def test_two_drafted_tokens_are_judged_in_turn(ask):
    """Chi-square on the next two tokens; if the first is rejected, the second is drawn from the full model."""
    size, trials = 5, 2000
    dice = torch.Generator().manual_seed(1)
    logits, drafting = torch.randn(3, size, generator=dice), torch.randn(2, size, generator=dice)
    sampling = Sampling(seed=3, **ask)
    p = probabilities(logits, [sampling] * 3).double()
    q = probabilities(drafting, [sampling] * 2)
    sampler = Sampler(sampling, [0], size, torch.device("cpu"))
    counts, kinds = torch.zeros(size, size), [0, 0, 0]
    for _ in range(trials):
        first, second = draw(q, torch.tensor([sampler.draw(), sampler.draw()]).double()).tolist()
        kept, after = verdict(logits, torch.tensor([first, second]), list(q), sampler).tolist()
        kinds[kept] += 1
        pair = ((after, int(draw(p[1:2], torch.tensor([sampler.draw()]).double()))), (first, after), (first, second))
        counts[pair[kept]] += 1
    assert min(kinds) > 50, "none, one and both are kept"
    assert chi_square(counts, trials * p[0][:, None] * p[1]) > 1e-4


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The p-value; cells with fewer than five expected counts are merged."""
    assert not counts[expected == 0].any(), "something that cannot be was drawn"
    large, small = expected >= 5, (expected > 0) & (expected < 5)
    seen, wanted = ([*x[large].tolist(), *([float(x[small].sum())] if small.any() else [])] for x in (counts, expected))
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, wanted, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2), torch.tensor(statistic / 2)))


def test_the_statistic_tells_another_distribution():
    dice = torch.Generator().manual_seed(0)
    wanted = torch.tensor([0.4, 0.3, 0.2, 0.099, 0.001])
    drawn = torch.multinomial(wanted, 3000, replacement=True, generator=dice).bincount(minlength=5).float()
    assert chi_square(drawn, wanted * 3000) > 0.01
    assert chi_square(drawn, torch.tensor([0.45, 0.25, 0.2, 0.099, 0.001]) * 3000) < 1e-4


def test_at_temperature_0_tokens_are_kept_up_to_the_first_that_is_not_the_likeliest():
    logits = torch.eye(5)[[3, 1, 4]]
    sampler = Sampler(Sampling(0), [0], 5, torch.device("cpu"))
    for drafted, expected in (([3, 1], [2, 4]), ([3, 2], [1, 1]), ([0, 1], [0, 3])):
        assert verdict(logits, torch.tensor(drafted), [], sampler).tolist() == expected


def test_penalties_count_drafted_tokens_before_a_place_and_forget_those_that_are_rejected():
    logits = torch.tensor([[0.0, 1.0, 0.8], [0.0, 1.0, 0.8]])
    sampler = Sampler(Sampling(0, frequency_penalty=1.0), [0], 3, torch.device("cpu"))
    assert verdict(logits, torch.tensor([1]), [], sampler).tolist() == [1, 2]
    assert verdict(logits, torch.tensor([2]), [], sampler).tolist() == [0, 1]
    assert sampler.adjusted(logits[0]).tolist() == pytest.approx([0.0, 1.0, 0.8])


# --- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "expected"),
    [(0.61, (1.12, 1.22, 1.32)), (0.47, (1.26, 1.42, 1.58)), (0.36, (1.41, 1.67, 1.90)), (0.25, (1.69, 2.09, 2.47))],
)
def test_the_best_length_gives_the_known_speedups(cost, expected):
    """Published tables: their costs have two digits, which is 0.02 for the largest speedups."""
    best = [max(speedup(acceptance, length, cost) for length in range(1, 30)) for acceptance in (0.8, 0.9, 0.95)]
    assert best == pytest.approx(expected, abs=0.02)


def test_the_page_has_the_speedups_of_the_formula():
    page = (Path(__file__).parents[2] / "docs" / "SPECULATION.md").read_text(encoding="utf-8")
    heading, table = re.findall(r"^\| c (\|.*)\|\n\|[-:|]*\n((?:\|.*\|\n)+)", page, re.MULTILINE)[0]
    chances = [float(chance) for chance in re.findall(r"a = ([\d.]+)", heading)]
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) == len(chances) == 4
    for cost, *shown in rows:
        best = [max(speedup(chance, length, cost) for length in range(LONGEST + 1)) for chance in chances]
        assert shown == pytest.approx(best, abs=0.0051)


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_a_draft_pays_only_where_acceptance_is_above_its_cost(acceptance, cost):
    pays = max(speedup(acceptance, length, cost) for length in range(1, 12)) > 1 + 1e-9
    assert pays == (acceptance > cost + 1e-9) or abs(acceptance - cost) < 1e-6


# --- what it costs ----------------------------------------------------------------------------------------------------

SITES = (Site("stem", False, 10, 90), Site("a", True, 10, 90, router=5), Site("b", True, 0, 100, router=5))


def work(*columns: tuple[float, float, float]) -> np.ndarray:
    return np.array(columns).T


def test_the_cost_of_a_draft_is_what_it_reads_of_the_weights():
    found = Speculation(SITES, outside=40)
    found.record(2, work((1, 0, 0), (1, 1, 0)), work((1, 1, 1), (1, 1, 1), (1, 1, 1)))
    fixed = 40 + 100 + 15 + 5
    assert found.draft_cost == pytest.approx((fixed + 90 / 2) / (fixed + 190))
    assert found.verify_cost(4) == 1, "where nothing is skipped, one pass reads every weight once"
    assert (found.drafted, found.accepted, found.judged, found.passes) == (2, 2, 2, 1)
    assert found.acceptance == 1
    assert found.expected_speedup == pytest.approx(3 / (2 * found.draft_cost + 1))


def test_verifying_several_tokens_reads_what_any_of_them_needs():
    found = Speculation(SITES, outside=40)
    found.record(0, work((1, 0, 0)), work((1, 1, 0), (1, 0, 0)))
    fixed, plain = 160, 160 + 90 / 2
    assert found.verify_cost(1) == pytest.approx((fixed + 90 * 0.75) / plain)
    assert found.verify_cost(2) == pytest.approx((fixed + 90 * 0.875) / plain)
    assert (found.acceptance, found.judged) == (0.0, 1)
    assert "acceptance 0.000" in found.summary()


def test_nothing_drafted_is_said_so():
    assert Speculation(SITES, 40).summary() == "nothing was drafted"


# --- how many tokens are drafted --------------------------------------------------------------------------------------


def simulated(
    acceptance: float, steps: int, found: Speculation | None = None, seed: int = 0
) -> tuple[list[int], Speculation]:
    """The chosen lengths if tokens are kept with this probability and drafts skip both sites."""
    found, dice, lengths = found or Speculation(SITES, 40), np.random.default_rng(0), []
    for _ in range(steps):
        length = found.next_length(100)
        lengths.append(length)
        if length:
            misses = np.flatnonzero(dice.random(length) >= acceptance)
            accepted = int(misses[0]) if len(misses) else length
            found.record(accepted, work(*[(1, 0, 0)] * length), work(*[(1, 1, 1)] * (length + 1)))
    return lengths, found


def test_the_first_draft_has_a_middling_length_and_good_ones_get_longer():
    lengths, found = simulated(0.97, 60)
    assert lengths[0] == FIRST
    assert np.mean(lengths[20:]) > FIRST
    assert max(lengths) <= LONGEST
    assert found.expected_speedup > 1.3


def test_lengths_follow_acceptance():
    means = [np.mean(simulated(acceptance, 200)[0]) for acceptance in (0.3, 0.6, 0.8, 0.95, 1.0)]
    assert means == sorted(means)
    assert means[0] < 0.5
    assert means[-1] > LONGEST - 1


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again_ever_more_rarely():
    """A drafted token costs 0.457 here, and almost none are kept."""
    lengths, _ = simulated(0.05, 2000)
    tried = [step for step, length in enumerate(lengths) if length]
    assert lengths[tried[-1]] == TRIED
    gaps = np.diff(tried)
    gaps = gaps[gaps > 1]
    assert gaps[0] == SHORTEST_PAUSE + 1
    assert gaps.max() == LONGEST_PAUSE + 1
    assert sum(lengths[100:]) / 1900 < 0.05


def test_drafting_comes_back_when_the_text_gets_easier():
    _, found = simulated(0.05, 300)
    lengths, _ = simulated(0.97, 600, found)
    assert np.mean(lengths[-200:]) > FIRST


def test_drafting_goes_by_the_clock_where_that_is_known():
    """Drafts that are always kept pay off by the weights read, but not if passes are much slower than that."""
    by_weights, _ = simulated(1.0, 50)
    draft = 160 / 350
    slow = Pace(1 / draft, ((1, 1.0), (LONGEST, LONGEST + 1)))  # as long as one plain step for each token
    lengths, found = simulated(1.0, 50, Speculation(SITES, 40, slow))
    assert min(by_weights) > 0
    assert lengths[0] == FIRST
    assert sum(lengths[1:]) <= 3 * TRIED
    assert found.expected_speedup < 1
    assert found.draft_cost == pytest.approx(draft), "what is told of costs is of the weights"


def test_the_first_draft_goes_by_what_is_known():
    """The initial estimate is that 0.8 of the drafted tokens are kept."""
    cheap, full = (Site("a", True, 0, 80), Site("b", True, 0, 10)), ((0.0, 0.0), (1.0, 1.0))
    first = [Speculation(cheap, outside, Pace(works=full)).next_length(100) for outside in (10, 90)]
    assert first == [6, 2], "costs of 0.1: 2.47, where 5 and 7 have 2.46, 2.45; of 0.5: 1.22, where 1 and 3 have less"
    half = Speculation(cheap, 10, Pace(works=((0.0, 0.0), (0.5, 0.5))))
    assert half.verify_cost(1) == pytest.approx((10 + 0.75 * 90) / (10 + 0.5 * 90)), "where the full model skips"
    lengths, _ = simulated(
        1.0, SHORTEST_PAUSE + 2, Speculation(SITES, 40, Pace(1.0, ((1, 1.8),), ((1, 0, 0), (1, 1, 1))))
    )
    assert lengths[:-1] == [*[0] * SHORTEST_PAUSE, TRIED], "tried in spite of it"
    assert lengths[-1] > 0, "and found to pay"


def test_factors_between_those_that_were_measured_are_on_the_line_between_them():
    pace = Pace(1.0, ((1, 2.0), (4, 5.0), (8, 5.5)))
    assert [pace.verifying(length) for length in (0.5, 1, 2, 4, 6, 8, 9)] == [2.0, 2.0, 3.0, 5.0, 5.25, 5.5, 5.5]
    found = Speculation(SITES, 40, replace(pace, draft=1.5))
    found.record(1, work((1, 0, 0), (1, 0, 0)), work((1, 1, 1), (1, 1, 1), (1, 1, 1)))
    assert found.expected_speedup == pytest.approx(1.75 / (2 * 1.5 * 160 / 350 + 3.0)), "acceptance 0.5"


def test_no_more_is_drafted_than_there_is_room_for():
    found = Speculation(SITES, 40)
    assert [found.next_length(room) for room in (0, -1, 2)] == [0, 0, 2]
    for _ in range(30):
        found.record(3, work(*[(1, 0, 0)] * 3), work(*[(1, 1, 1)] * 4))
    assert found.next_length(1) == 1
    assert found.next_length(100) == LONGEST


def test_a_model_that_skips_knows_its_costs():
    """Costs of a real method: sites with 0 keys, so that only weights count."""
    model = lively("budget")
    found = Speculation(model.method.sites(keys=0), model.head_flops)
    sites = len(model.method.sites(keys=0))
    found.record(1, np.ones((sites, 1)), np.ones((sites, 2)))
    assert found.draft_cost == 1
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "positions" not in name)
    # Each weight is read once and costs 2 FLOPs; the router's second matrix, a single row, is included.
    assert found._fixed + found._routed.sum() == pytest.approx(2 * weights, rel=0.01)
