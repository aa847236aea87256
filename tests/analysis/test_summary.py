"""The summary in words, on made-up numbers: a claim appears exactly when its interval excludes zero in every seed."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.made_up import estimate, nothing, quiet
from tokendepth.analysis.summary import NUMBERS, direction, shown, summarise


def words(*runs: dict, kappa: dict | None = None) -> str:
    pairs = [{"seeds": [0, 1], "per_site": [{"kappa": kappa or nothing()}]}] if len(runs) > 1 else []
    tree = {"method": "budget", "split": "val", "corpus": "c", "context": 8, "runs": list(runs), "agreement": pairs}
    return " ".join(summarise(copy.deepcopy(tree)))


CLAIMS = {
    "more for 'space' than for all other tokens, by": lambda run, e: run["by"]["kind"]["groups"][1].update(
        difference=e
    ),
    "tokens whose prediction is less certain get": lambda run, e: run["by"]["entropy of the prediction"].update(
        rank_correlation=e
    ),
    "With the previous token, a table predicts more": lambda run, e: run["lookup"][0].update(gain_of_previous=e),
    "the loss is lower by": lambda run, e: run["skipped"][0].update(loss=e),
    "after a skipped 'letter' it is lower by": lambda run, e: run["skipped"][1].update(loss_where_skipped=e),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_appears_exactly_when_every_seed_supports_it(claim):
    def run(seed: int, *ends: float | None) -> dict:
        made = copy.deepcopy(quiet(seed))
        CLAIMS[claim](made, estimate(*ends))
        return made

    clear, unclear, other_way = (0.2, 0.1, 0.3), (0.2, -0.001, 0.4), (-0.2, -0.3, -0.1)
    assert claim.lower() in words(run(0, *clear)).lower()
    assert claim.lower() in words(run(0, *clear), run(1, *clear)).lower()
    for second in (unclear, (0.2, None, None)):
        assert claim.lower() not in words(run(0, *second)).lower()
    for second in (unclear, other_way):
        assert claim.lower() not in words(run(0, *clear), run(1, *second)).lower()


def test_where_nothing_differs_nothing_is_said_to():
    said = words(quiet())
    assert "no group is shown to differ" in said
    assert all(name in said.split("No relation is claimed between depth and")[1] for name in NUMBERS)
    assert "At no routed block is the previous token shown to help a table predict decisions" in said
    assert "no later decision flipped" in said
    assert "not shown to differ" in said
    assert "Only one seed: the results may not hold for others." in said
    assert "12,345 tokens" in said
    assert "seed 0." in said
    assert "lookup table" not in said  # between 30% and 95%, it may be one or not


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ((0.95, 0.92, 0.98), "block 1 is close to a lookup table"),
        ((0.5, 0.4, 0.6), "block 1 is not a lookup table"),
        ((0.9, 0.85, 0.95), None),
        ((0.95, None, None), None),
    ],
)
def test_a_lookup_table_is_called_one_only_by_its_interval(share, said):
    run = quiet()
    run["lookup"][0]["share"] = estimate(*share)
    found = words(run)
    assert said in found if said else "lookup table" not in found


def test_a_router_that_never_decides_is_no_lookup_table():
    run = quiet()
    run["lookup"][0].update(share=estimate(None), chance=None)
    assert "In no block do the routers of all runs decide differently" in words(run)


def test_a_method_that_cannot_run_everyone_says_so():
    assert "cannot run with every token active" in words({**quiet(), "skipped": None})


def test_seeds_that_agree_beyond_chance():
    assert "Cohen's kappa 0.50" in words(quiet(), quiet(1), kappa=estimate(0.5, 0.4, 0.6))
    assert "At no routed block are all pairs of seeds shown to agree" in words(quiet(), quiet(1), kappa=nothing())
    assert "seeds 0, 1." in words(quiet(), quiet(1))
    assert "in all 2 seeds" in words(quiet(), quiet(1))


@pytest.mark.parametrize(
    ("size", "word"), [(0.05, "hardly more"), (0.2, "weakly more"), (0.4, "moderately more"), (-0.7, "clearly less")]
)
def test_a_correlation_is_called_as_strong_as_its_weakest_seed(size, word):
    def run(seed: int, value: float) -> dict:
        made = quiet(seed)
        made["by"]["frequency"]["rank_correlation"] = estimate(value, value - 0.01, value + 0.01)
        return made

    stronger = 0.9 if size > 0 else -0.9
    assert f"ore frequent tokens get {word} depth" in words(run(0, stronger), run(1, size))


@given(st.lists(st.tuples(*[st.floats(-1, 1)] * 3), min_size=1, max_size=4))
def test_direction_is_that_of_all_intervals_or_none(ends):
    estimates = [estimate(sorted(three)[1], min(three), max(three)) for three in ends]
    above, below = all(e["low"] > 0 for e in estimates), all(e["high"] < 0 for e in estimates)
    assert direction(estimates) == (1 if above else -1 if below else 0)


def test_numbers_are_shown_with_their_interval_or_range():
    assert shown([estimate(0.5, 0.4, 0.6)], ".1f") == "0.5 (0.4 to 0.6)"
    assert shown([estimate(0.5)], ".1f") == "0.5"
    assert shown([estimate(0.5), estimate(0.7)], ".1f") == "0.5 to 0.7"
    assert shown([estimate(None)]) == "unknown"
