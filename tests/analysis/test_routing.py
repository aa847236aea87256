"""Depth by token type: groups that cover the text once, means that a plain loop finds, correlations that are right."""

import numpy as np
import pytest
import torch

from paper.initialisation import at_initialisation
from tests.tiny import TEXT, tiny
from tokendepth.analysis.routing import measure, rank_correlation
from tokendepth.config import BudgetConfig, DataConfig, RunConfig, TSAConfig
from tokendepth.data import load
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import load_model
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("tsa")
    return train(tiny(folder, method=TSAConfig(depth_penalty=0.005), steps=60), folder / "run", show=False)


@pytest.fixture(scope="module")
def found(run) -> dict:
    return measure(run, device="cpu")


def test_each_kind_of_group_covers_the_text_once(found):
    shares: dict[str, float] = {}
    for group in found["groups"]:
        shares[group["kind"]] = shares.get(group["kind"], 0) + group["share"]
    known = {kind: share for kind, share in shares.items() if kind != "surprisal of the token"}
    assert all(share == pytest.approx(1) for share in known.values())
    # The very first token has no surprisal.
    assert shares["surprisal of the token"] == pytest.approx(1 - 1 / found["tokens"])
    assert set(shares) == {
        "character class", "position in word", "frequency", "surprisal of the token", "surprisal of the next"
    }  # fmt: skip


def test_a_groups_depth_is_the_mean_over_its_tokens(run, found):
    model, dataset = load_model(run, torch.device("cpu")), load(run.config.data)
    ids = dataset.split_ids("val")
    is_space, works = [], []
    for inputs, _ in dataset.windows("val", run.config.model.context, 1):
        works.append(model(torch.from_numpy(inputs), execution="hard").trace.work[1:, 0])
        is_space += [dataset.tokenizer.chars[i] == " " for i in inputs[0]]
    assert len(is_space) == len(ids) - 1 == found["tokens"]
    work = torch.cat(works, dim=1)
    expected = work[:, torch.tensor(is_space)].mean(1).tolist()
    (space,) = [group for group in found["groups"] if group["group"] == "space"]
    assert space["hard"] == pytest.approx(expected, abs=1e-6)
    assert space["share"] == pytest.approx(np.mean(is_space))
    assert found["modes"]["hard"]["per_router"] == pytest.approx(work.mean(1).tolist(), abs=1e-6)


def test_words_have_a_first_and_a_last_character(found):
    shares = {group["group"]: group["share"] for group in found["groups"] if group["kind"] == "position in word"}
    assert set(shares) == {"first", "middle", "last", "outside words"}
    # A word has one first character, and a last one unless it has only one.
    assert shares["first"] >= shares["last"] > 0
    assert " a " not in TEXT


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [1, 10, 100, 1000], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 1, 2, 2], [5, 5, 6, 6], 1.0),
        ([1, 1, 1], [1, 2, 3], None),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
    ],
)
def test_rank_correlation(a, b, expected):
    found = rank_correlation(np.array(a), np.array(b))
    assert found == (expected if expected is None else pytest.approx(expected))


def test_a_method_without_soft_has_hard_figures_only(tmp_path):
    run = train(tiny(tmp_path, method=BudgetConfig(), steps=1), tmp_path / "run", show=False)
    found = measure(run, device="cpu", tokens=64)
    assert set(found["modes"]) == {"hard"}
    assert found["tokens"] == 64


def test_what_is_no_text_is_refused(tmp_path):
    config = tiny(tmp_path, steps=1, context=48)
    run = train(RunConfig(DataConfig("copy"), config.model, config.method, config.train), tmp_path / "run", show=False)
    with pytest.raises(UserError, match="characters of a text"):
        measure(run)


def test_before_training_the_bias_alone_decides(tmp_path):
    row = at_initialisation(tiny(tmp_path, method=TSAConfig(), d_model=64), device="cpu", tokens=64)
    assert row["soft"]["active_fraction"] == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.05)
    assert row["hard"]["active_fraction"] == 1.0
    assert row["config"]["model"]["vocab_size"] > 0
