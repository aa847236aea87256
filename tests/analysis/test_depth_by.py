"""Depth by attribute and what explains decisions, on traces whose answer is known by construction."""

import numpy as np
import pytest
import torch

from tokendepth.analysis.attributes import CHARACTER_KINDS, WORD_KINDS, Spelled, frequencies
from tokendepth.analysis.lookup import lookups, token_share
from tokendepth.analysis.passes import Tokens, replaced
from tokendepth.analysis.study import agreement, skipped, stability
from tokendepth.analysis.table import depth_by
from tokendepth.analysis.windows import FEWEST, Windows, excludes_zero
from tokendepth.errors import UserError
from tokendepth.trace import DepthTrace, Site

WINDOWS, TIME, TYPES = 60, 50, 12
SITES = (Site("stem", False, 0, 1), Site("block 1", True, 0, 1), Site("block 2", True, 0, 1))


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, TYPES, (WINDOWS, TIME))


@pytest.fixture(scope="module")
def windows() -> Windows:
    return Windows(np.repeat(np.arange(WINDOWS), TIME))


@pytest.fixture(scope="module")
def first() -> np.ndarray:
    return np.tile(np.arange(TIME) == 0, WINDOWS)


def dice(share: float = 0.4, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random(WINDOWS * TIME) < share


def trace(*routed: np.ndarray, valid=None) -> DepthTrace:
    work = np.stack([np.ones_like(routed[0], dtype=float), *routed]).astype(np.float32)
    return DepthTrace(torch.from_numpy(work), SITES[: 1 + len(routed)], "sparse", valid=valid)


# --- depth_by ---------------------------------------------------------------------------------------------------------


def test_depth_of_a_group_is_the_mean_of_the_routed_sites(ids):
    even, small = ids % 2 == 0, ids < 3
    table = depth_by(trace(even, small), {"parity": np.where(even, "even", "odd")})["parity"]
    rows = {row["group"]: row for row in table["groups"]}
    assert set(rows) == {"even", "odd"}
    assert rows["even"]["tokens"] == even.sum()
    assert [site["value"] for site in rows["even"]["per_site"]] == pytest.approx([1, small[even].mean()])
    assert rows["odd"]["depth"]["value"] == pytest.approx((0 + small[~even].mean()) / 2)
    expected = rows["even"]["depth"]["value"] - rows["odd"]["depth"]["value"]
    assert rows["even"]["difference"]["value"] == pytest.approx(expected)
    assert excludes_zero(rows["even"]["difference"])
    assert "rank_correlation" not in table


def test_a_known_correlation_is_found_and_none_where_there_is_none(ids):
    noise = np.random.default_rng(3).random(ids.shape)
    found = depth_by(trace(ids >= 6), {"id": ids, "against": -ids, "noise": noise})
    exact = found["id"]["rank_correlation"]
    # The upper six of 0 to 11: covariance 1.5, variances 143/12 and 1/4.
    assert exact["value"] == pytest.approx(np.sqrt(108 / 143), abs=0.01)
    assert exact["low"] < exact["value"] < exact["high"]
    assert found["against"]["rank_correlation"]["value"] == pytest.approx(-exact["value"])
    assert not excludes_zero(found["noise"]["rank_correlation"])
    assert [row["mean"] for row in found["id"]["groups"]] == sorted(row["mean"] for row in found["id"]["groups"])
    assert sum(row["share"] for row in found["noise"]["groups"]) == pytest.approx(1)
    assert len(found["noise"]["groups"]) == 10


def test_padding_and_what_is_unknown_count_nowhere(ids):
    valid = np.ones(ids.shape, bool)
    valid[:, -5:] = False
    values = ids.astype(float)
    values[:, 0] = np.nan
    found = depth_by(trace(ids >= 6, valid=torch.from_numpy(valid)), {"id": values, "name": np.where(ids > 2, "x", "")})
    assert sum(row["tokens"] for row in found["id"]["groups"]) == WINDOWS * (TIME - 6)
    assert [row["group"] for row in found["name"]["groups"]] == ["x"]
    assert found["name"]["groups"][0]["tokens"] == ((ids > 2) & valid).sum()


def test_an_interval_covers_the_truth_as_often_as_it_says_when_windows_differ():
    """Tokens of a window are alike: resampling tokens would give far too narrow an interval."""
    covered, trials = 0, 200
    for seed in range(trials):
        random = np.random.default_rng(seed)
        values = np.repeat(random.normal(size=40), 25) + 0.1 * random.normal(size=1000)
        found = Windows(np.repeat(np.arange(40), 25), seed=seed).mean(values)
        covered += found["low"] < 0 < found["high"]
    assert covered / trials == pytest.approx(
        0.94, abs=0.05
    )  # three standard errors; with 40 windows a little below 95%


def test_few_windows_get_no_interval():
    few = Windows(np.repeat(np.arange(FEWEST - 1), 10)).mean(np.arange(190.0))
    assert few == {"value": 94.5, "low": None, "high": None}
    enough = Windows(np.repeat(np.arange(FEWEST), 10))
    rare = np.arange(200) < 30  # in three windows only
    assert enough.mean(np.arange(200.0))["low"] is not None
    assert enough.mean(np.arange(200.0), rare)["low"] is None
    assert enough.difference(np.arange(200.0), rare)["value"] == pytest.approx(14.5 - 114.5)


def test_the_same_seed_gives_the_same_table(ids):
    how = {"id": ids}
    assert depth_by(trace(ids >= 6), how, seed=4) == depth_by(trace(ids >= 6), how, seed=4)
    other = depth_by(trace(ids >= 6), how, seed=5)["id"]["rank_correlation"]
    assert other["low"] != depth_by(trace(ids >= 6), how, seed=4)["id"]["rank_correlation"]["low"]


def test_wrong_input_is_refused_in_one_line(ids):
    with pytest.raises(UserError, match=r"'id' has the shape \(2,\); expected .* \(60, 50\)"):
        depth_by(trace(ids > 1), {"id": [1, 2]})
    dense = DepthTrace(np.ones((1, 2, 3)), SITES[:1], "sparse")
    with pytest.raises(UserError, match="no routed site"):
        depth_by(dense, {})


# --- is it a lookup table? --------------------------------------------------------------------------------------------


def test_a_rule_on_the_token_is_a_lookup_table(ids, windows, first):
    decision = (ids % 3 == 0).ravel()
    found = token_share(decision, ids.ravel(), windows)
    assert found["share"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    tables = lookups(decision, ids.ravel(), first, windows)
    assert tables["by_token"]["value"] == 1
    assert tables["gain_of_previous"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert tables["by_nothing"]["value"] == pytest.approx(1 - decision[~first].mean())


@pytest.mark.parametrize("types", [TYPES, 900])
def test_dice_are_explained_by_nothing_however_many_the_types(windows, first, types):
    text = np.random.default_rng(7).integers(0, types, WINDOWS * TIME)
    found = token_share(dice(), text, windows)
    assert found["share"]["low"] < 0 < found["share"]["high"]
    assert found["chance"] > (0.2 if types == 900 else 0)  # what an uncorrected figure would have claimed
    tables = lookups(dice(), text, first, windows)
    assert not excludes_zero(tables["gain_of_token"]) or tables["gain_of_token"]["value"] < 0
    assert not excludes_zero(tables["gain_of_previous"]) or tables["gain_of_previous"]["value"] < 0


def test_a_mixture_of_rule_and_dice_lies_between(ids, windows):
    decision = np.where(dice(0.5, seed=2), (ids % 2 == 0).ravel(), dice(0.5, seed=3))
    # Right with probability 3/4: 1 - H(1/4) of one bit.
    found = token_share(decision, ids.ravel(), windows)["share"]
    expected = 1 + 0.75 * np.log2(0.75) + 0.25 * np.log2(0.25)
    assert found["low"] < expected < found["high"]
    assert found["high"] - found["low"] < 0.1


def test_a_rule_on_the_token_before_is_found(ids, windows, first):
    before = np.roll(ids, 1, axis=1)
    decision = (before % 2 == 0).ravel()
    assert token_share(decision, ids.ravel(), windows)["share"]["low"] < 0.01
    tables = lookups(decision, ids.ravel(), first, windows)
    assert tables["gain_of_previous"]["low"] > 0.4
    assert tables["by_pair"]["value"] > 0.97  # but for pairs that were seen fewer than five times


def test_a_decision_that_never_changes_has_nothing_to_explain(ids, windows, first):
    always = np.ones(ids.size, bool)
    assert token_share(always, ids.ravel(), windows)["share"]["value"] is None
    assert lookups(always, ids.ravel(), first, windows)["by_nothing"]["value"] == 1


# --- stability, skipping, seeds ---------------------------------------------------------------------------------------


def tokens(**changes) -> Tokens:
    n = WINDOWS * TIME
    position = np.tile(np.arange(TIME), WINDOWS)
    plain = {
        "ids": np.zeros(n, int), "window": np.repeat(np.arange(WINDOWS), TIME), "position": position,
        "loss": np.ones(n), "entropy": np.ones(n), "work": dice()[None].astype(float), "full_loss": np.ones(n),
        "flips": np.zeros((1, n), bool), "distance": position - 10,
    }  # fmt: skip
    return Tokens(**{**plain, **changes})


def test_flips_are_counted_by_distance(windows):
    position = np.tile(np.arange(TIME), WINDOWS)
    calm = stability(tokens(), windows)
    assert all(row["flips"]["value"] == 0 for row in calm)
    assert [(row["from"], row["to"]) for row in calm] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 39)]
    after_one = stability(tokens(flips=(position == 11)[None]), windows)
    assert [row["flips"]["value"] for row in after_one] == [1, 0, 0, 0, 0, 0, 0]
    # A change of the token itself, or of a later one, says nothing.
    assert all(row["flips"]["value"] == 0 for row in stability(tokens(flips=(position <= 10)[None]), windows))


def test_what_skipping_costs_by_kind(windows):
    text = tokens()
    kinds = np.where(np.arange(text.ids.size) % 2, "letter", "space")
    passed = ~text.decisions[0]
    loss = 1 + 0.5 * (passed & (kinds == "space"))
    rows = {row["kind"]: row for row in skipped(tokens(loss=loss), kinds, windows) or []}
    assert rows["space"]["loss_where_skipped"]["value"] == pytest.approx(0.5)
    assert rows["space"]["loss"]["value"] == pytest.approx(0.5 * passed[kinds == "space"].mean())
    assert rows["letter"]["loss"]["value"] == 0
    assert not excludes_zero(rows["letter"]["loss"])
    assert rows["all"]["skipped"]["value"] == pytest.approx(passed.mean())
    assert skipped(tokens(full_loss=None), kinds, windows) is None


def test_seeds_that_decide_alike_by_chance_and_that_do_alike(windows):
    a, b = dice(0.8)[None], dice(0.8, seed=2)[None]
    by_chance, alike, opposite = (
        agreement([a, other], windows, [0, 1])[0]["per_site"][0] for other in (b, a, ~a)
    )  # fmt: skip
    assert by_chance["agree"]["value"] == pytest.approx(0.68, abs=0.03)  # high, and still chance
    assert not excludes_zero(by_chance["kappa"])
    assert alike["kappa"]["value"] == 1
    assert opposite["kappa"]["value"] < -0.4
    assert [row["seeds"] for row in agreement([a, b, a], windows, [4, 5, 6])] == [[4, 5], [4, 6], [5, 6]]
    assert agreement([a], windows, [0]) == []
    constant = agreement([a | True, a | True], windows, [0, 1])[0]["per_site"][0]
    assert constant["kappa"]["value"] is None


@pytest.mark.parametrize("begins", [0, 2])
def test_one_token_of_each_window_is_replaced_by_another(ids, begins):
    text = torch.from_numpy(ids)
    valid = np.broadcast_to(np.arange(TIME) >= begins, ids.shape)
    changed, where = replaced(text, valid, np.arange(TYPES), np.random.default_rng(0))
    assert ((changed != text).sum(1) == 1).all()
    assert (changed != text)[torch.arange(WINDOWS), torch.from_numpy(where)].all()
    assert where.min() >= begins
    # A token that the training text does not have becomes one that it has.
    strange, _ = replaced(text + 100, valid, np.arange(TYPES), np.random.default_rng(0))
    assert ((strange < 100).sum(1) == 1).all()


# --- attributes -------------------------------------------------------------------------------------------------------


def test_kinds_of_characters_and_bytes():
    text = "Ab 1,\n\u2013"
    chars = sorted(set(text))
    ids = np.array([chars.index(char) for char in text])
    spelled = Spelled(ids, [char.encode() for char in chars])
    assert spelled.by_character
    expected = ["capital", "letter", "space", "digit", "punctuation", "line break", "punctuation"]
    assert spelled.kinds().tolist() == expected
    assert set(expected) < set(CHARACTER_KINDS)
    assert spelled.positions().tolist() == ["first", "last", *["outside words"] * 5]
    as_bytes = Spelled(np.frombuffer(text.encode(), np.uint8), [bytes([b]) for b in range(256)])
    assert as_bytes.by_character
    assert as_bytes.kinds().tolist() == [*expected[:-1], *["other"] * 3]


def test_kinds_of_longer_tokens_depend_on_what_comes_before():
    spellings = [b"The", b" Token", b"izer", b"s", b" 42", b",", b" ", b"\n\n", b"\xe2\x80", b"", b" (", b"\nand"]
    spelled = Spelled(np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 3, 11]), spellings)
    assert not spelled.by_character
    begins, goes_on = WORD_KINDS[:2]
    assert spelled.kinds().tolist() == [
        begins, begins, goes_on, goes_on, "number", "punctuation", "space", "line break", "other", "other",
        "punctuation", begins, begins,
    ]  # fmt: skip
    places = ["first", "first", "middle", "last", *["outside words"] * 7, "first", "first"]
    assert spelled.positions().tolist() == places


def test_frequency_is_of_the_training_text():
    assert frequencies(np.array([2, 0, 1]), np.array([0, 0, 0, 1]), 3).tolist() == [0, 0.75, 0.25]
