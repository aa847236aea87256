"""Tasks scored with models whose probabilities are all known, and the depth used."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.tiny import tiny
from tokendepth.config import BudgetConfig, DenseConfig, ModelConfig, RunConfig, SpanConfig
from tokendepth.data.tasks import Item, write_tasks
from tokendepth.data.tokenizer import CharTokenizer
from tokendepth.measure import tasks
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.measure.tasks import score, score_run
from tokendepth.methods import build
from tokendepth.model import LanguageModel
from tokendepth.training.loop import train

LETTERS = CharTokenizer(" abcdefg")
SHAPE = ModelConfig(
    vocab_size=8, d_model=8, n_layer=3, n_head=2, d_ff=8, context=16, norm="rms", positions="rotary", dropout=0.0,
    tie_head=False,
)  # fmt: skip
ROUNDING = 1e-5  # for sums of a dozen float32 logarithms


def bigrams(method=None) -> tuple[LanguageModel, Tensor]:
    """A bigram model by construction: blocks add nothing, and the head is a table of log-probabilities."""
    model = build(RunConfig(model=SHAPE, method=method or DenseConfig())).eval()
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(1)
    with torch.no_grad():
        for name, weight in model.method.named_parameters():
            if "attention.out." in name or "ffn.down." in name:
                weight.zero_()
        model.embedding.weight.copy_(torch.eye(8))
        assert isinstance(model.head, nn.Linear)
        model.head.weight.copy_(table.T * math.sqrt(1 / 8 + SHAPE.norm_eps))  # the norm divides a one by this
    return model, table.double()


def log_p(table: Tensor, context: str, choice: str) -> float:
    ids = LETTERS.encode(context[-1] + choice)
    return sum(float(table[a, b]) for a, b in pairwise(ids))


text = st.text("abcdefg ", min_size=1, max_size=6)
items = st.builds(
    lambda context, choices, answer: Item(context, tuple(choices), answer % len(choices)),
    text, st.lists(text, min_size=1, max_size=4), st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(items, min_size=1, max_size=6))
def test_a_model_whose_probabilities_are_known(asked):
    model, table = bigrams()
    found = score(model, LETTERS, asked)
    nats = 0.0
    for item, plain, scaled in zip(asked, found.right, found.right_per_character, strict=True):
        sums = [log_p(table, item.context, choice) for choice in item.choices]
        nats -= sums[item.answer]
        if len(sums) == 1:
            ids = LETTERS.encode(item.context[-1] + item.choices[0])
            greedy = all(int(table[a].argmax()) == b for a, b in pairwise(ids))
            assert plain == scaled == greedy
            continue
        by_character = [p / max(1, len(t.removeprefix(" "))) for p, t in zip(sums, item.choices, strict=True)]
        for values, said in ((sums, plain), (by_character, scaled)):
            *_, second, best = sorted(values)
            if best - second > ROUNDING:  # otherwise rounding decides
                assert said == (values[item.answer] == best)
    size = sum(len(item.choices[item.answer]) for item in asked)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=ROUNDING)


ASKED = [
    Item("abc", (" defg", " ga", "bb"), 1),
    Item("gg ga", ("a", "b"), 0),
    Item("fade", (" a bad cab",), 0),
    Item("bed", ("aaaaa", "gg"), 1),
]


def test_figures():
    model, _ = bigrams()
    found = replace(score(model, LETTERS, ASKED), right=[True, True, True, False])
    figures = found.figures()
    assert (figures["items"], figures["accuracy"]) == (4, 0.75)
    assert figures["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert figures["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 4)
    assert (figures["active_fraction"], figures["block_flops"], figures["shortened"]) == (1, 1, 0)
    # The last token of a choice is only predicted.
    read = sum(len(item.context + choice) - 1 for item in ASKED for choice in item.choices)
    assert figures["tokens"] == read


def test_the_size_of_batches_changes_nothing(monkeypatch):
    model, _ = bigrams()
    many = score(model, LETTERS, ASKED)
    monkeypatch.setattr(tasks, "AT_ONCE", 1)
    one = score(model, LETTERS, ASKED)
    assert (one.right, one.right_per_character) == (many.right, many.right_per_character)
    assert one.bits_per_byte == pytest.approx(many.bits_per_byte, rel=ROUNDING)
    assert one.depth.tokens == many.depth.tokens
    assert one.depth.work == many.depth.work


def test_of_a_long_context_the_end_is_read():
    model, table = bigrams()
    context, choice = "abcdefg" * 3, " dab"
    found = score(model, LETTERS, [Item(context, (choice,))])
    assert found.shortened == 1
    assert found.depth.tokens == SHAPE.context
    assert found.bits_per_byte == pytest.approx(-log_p(table, context, choice) / math.log(2) / 4, rel=ROUNDING)


@pytest.mark.parametrize("method", [BudgetConfig(budget=0.5), SpanConfig(begin=1, length=2, budget=0.5)])
def test_depth_is_what_was_executed(method, monkeypatch):
    """A routed model: sparse gives the same answers as hard, and the depth of reading choices one by one."""
    monkeypatch.setattr(tasks, "AT_ONCE", 1)  # padding lengthens attention rows
    model, _ = bigrams(method)
    calibrate_on(model, torch.arange(64).view(4, 16) % 7, 0.5)
    sparse, hard = (score(model, LETTERS, ASKED, execution=execution) for execution in ("sparse", "hard"))
    worked = tokens = flops = 0.0
    for item in ASKED:
        for choice in item.choices:
            ids = torch.tensor([LETTERS.encode(item.context + choice)[:-1]])
            with torch.no_grad():
                totals = model(ids, execution="sparse").trace.totals()
            worked += totals.active_fraction * totals.tokens
            tokens, flops = tokens + totals.tokens, flops + totals.flops_full_rows
    assert 0 < worked < tokens
    assert sparse.figures()["active_fraction"] == hard.figures()["active_fraction"] == pytest.approx(worked / tokens)
    assert sparse.depth.flops == pytest.approx(flops)
    assert sparse.figures()["block_flops"] < 1 < hard.figures()["block_flops"], "routers cost, skipping saves"
    assert sparse.right == hard.right
    full = score(model, LETTERS, ASKED, everyone=True)
    assert full.figures()["active_fraction"] == 1
    assert full.right == hard.right, "blocks add nothing here"


def test_a_run_is_scored_at_its_budget_another_and_the_full_one(tmp_path):
    run = train(tiny(tmp_path, SpanConfig(begin=1, length=1, budget=0.5)), tmp_path / "run", show=False)
    write_tasks(tmp_path / "tasks", {"wall": [Item("bottles hanging on the", (" wall", " llaw"), 0)]})
    own, less, full = (score_run(run, tmp_path / "tasks", budget=budget) for budget in (None, 0.2, 1.0))
    active = [found["tasks"]["wall"]["active_fraction"] for found in (less, own, full)]
    assert active[0] <= active[1] <= active[2] == 1
    assert active[0] < 1
    assert own["method"] == "span"
    assert json.loads(json.dumps(own)) == own
