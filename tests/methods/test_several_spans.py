"""Several spans in one model: each decides anew, from the states at its entry, with states of its own in the cache.

The contract suite has models with two spans, too.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.methods.test_span import MODEL, MODERN, TIME, close, dense_like, each_execution, method_of, tokens
from tests.methods.test_span import span as one_or_more
from tests.tiny import tiny
from tokendepth.cache import KVCache
from tokendepth.config import ModelConfig, RunConfig, SpanConfig
from tokendepth.context import Context
from tokendepth.errors import UserError
from tokendepth.infer.speculation import draft_thresholds
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import build
from tokendepth.methods.base import blocks_of
from tokendepth.methods.span_deciders import Dice
from tokendepth.model import LanguageModel
from tokendepth.training.loop import train

CLASSIC, LLAMA = (replace(shape, n_layer=7) for shape in (MODEL, MODERN))
each_shape = pytest.mark.parametrize("shape", [CLASSIC, LLAMA], ids=["classic", "modern"])


def spans(shape: ModelConfig = CLASSIC, **knobs) -> LanguageModel:
    """1 + 2 + 1 + 2 + 1 blocks."""
    return one_or_more(shape, **{"spans": 2, "between": 1, "length": 2, **knobs})


def given(first: Tensor, second: Tensor) -> Tensor:
    """The decisions `[batch, time]` of each span, for its two blocks."""
    return torch.stack([first, first, second, second])


def drawn(seed: int, batch: int = 4, share: float = 0.4) -> Tensor:
    return torch.rand(batch, TIME, generator=torch.Generator().manual_seed(seed)) < share


def by_blocks(model: LanguageModel, ids: Tensor, decisions: tuple[Tensor, Tensor]) -> Tensor:
    """Logits by plain blocks, one after the other; updates are neither weighted nor carried over."""
    state, ctx = model.entering(ids, "hard")
    blocks = blocks_of(method_of(model).blocks)
    for begin, active in zip((1, 4), decisions, strict=True):
        state = blocks[begin - 1](state, ctx)
        inside = replace(ctx, valid=active)
        for block in blocks[begin : begin + 2]:
            state = torch.where(active[..., None], block(state, inside), state)
    return model.readout(blocks[-1](state, ctx))


# --- the update -------------------------------------------------------------------------------------------------------


@each_shape
@each_execution
@torch.no_grad()
def test_each_span_has_its_own_decisions_by_hand(shape, execution):
    model, ids = spans(shape, decide="gain", carry="none").eval(), tokens()
    first, second = drawn(1), drawn(2)
    found = model(ids, execution=execution, decisions=given(first, second))
    assert close(found.logits, by_blocks(model, ids, (first, second)))
    assert not close(found.logits, by_blocks(model, ids, (second, first)))
    assert torch.equal(found.trace.work[1:3], first.expand(2, -1, -1).float())
    assert torch.equal(found.trace.work[4:6], second.expand(2, -1, -1).float())
    assert bool(found.trace.work[[0, 3, 6]].all()), "every token goes through the blocks between"


@each_shape
@each_execution
@torch.no_grad()
def test_all_none_and_one_of_both(shape, execution):
    model, ids = spans(shape, decide="gain").eval(), tokens()
    every = torch.ones_like(ids, dtype=torch.bool)
    for decisions, skip in (
        (given(every, every), range(0)),
        (given(~every, every), range(1, 3)),
        (given(every, ~every), range(4, 6)),
    ):
        out = model(ids, execution=execution, decisions=decisions)
        assert close(out.logits, dense_like(model, skip=skip)(ids).logits)


@torch.no_grad()
def test_two_spans_that_take_all_tokens_are_one_longer_span():
    """Without blocks between them, and without weights, where they are the same blocks."""
    two, ids = spans(decide="rule", carry="none", between=0).eval(), tokens()
    one = one_or_more(CLASSIC, decide="rule", carry="none", length=4).eval()
    one.load_state_dict({name: value for name, value in two.state_dict().items() if ".further." not in name})
    active = drawn(3)
    for execution in ("hard", "sparse"):
        both = two(ids, execution=execution, decisions=given(active, active))
        alone = one(ids, execution=execution, decisions=active.expand(4, *active.shape))
        assert close(both.logits, alone.logits)
        assert both.trace.totals().flops == pytest.approx(alone.trace.totals().flops, rel=1e-6)


@torch.no_grad()
def test_random_decisions_differ_between_spans():
    model, ctx = spans(decide="dice", budget=0.5), Context(ids=tokens(), positions=torch.arange(TIME))
    first, second = (span.decider for span in method_of(model).spans)
    assert isinstance(first, Dice)
    apart = (first(tokens(), ctx) > 0.5) != (second(tokens(), ctx) > 0.5)
    assert 0.2 < apart.float().mean() < 0.8


# --- the cache --------------------------------------------------------------------------------------------------------


@each_shape
@torch.no_grad()
def test_each_span_has_its_own_states_in_the_cache(shape):
    model, ids = spans(shape, decide="boundary", carry="smooth").eval(), tokens(3)
    first, second = drawn(1, 3), drawn(2, 3)
    decisions = given(first, second)
    whole = model(ids, execution="hard", decisions=decisions).logits
    for execution in ("hard", "sparse"):
        kept = KVCache(shape, 3, TIME, layers=7, like=model.norm.weight)
        parts = (slice(0, 9), slice(9, 10), slice(10, TIME))
        logits = [model(ids[:, p], execution=execution, decisions=decisions[..., p], cache=kept).logits for p in parts]
        assert close(torch.cat(logits, 1), whole)
        assert kept.states["span length"].tolist() == first.sum(1).tolist()
        assert kept.states["span length 1"].tolist() == second.sum(1).tolist()
        assert not torch.equal(kept.states["span update"], kept.states["span update 1"])
        assert not torch.equal(kept.states["boundary key"], kept.states["boundary key 1"])


# --- thresholds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decide", ["score", "boundary"])
@torch.no_grad()
def test_each_span_is_calibrated_for_its_own_states(decide):
    model, ids = spans(LLAMA, decide=decide).eval(), tokens(64)
    calibrate_on(model, ids, 0.4)
    first, _, second, _ = found = method_of(model).thresholds
    assert found == [first, first, second, second]
    assert first != second
    shares = model(ids, execution="hard").trace.work.mean((1, 2))
    assert shares[1:3].tolist() == pytest.approx([0.4] * 2, abs=0.01)
    assert shares[4:6].tolist() == pytest.approx([0.4] * 2, abs=0.01), "of states that the first span has changed"
    method_of(model).set_thresholds([0.1, 0.1, 0.2, 0.2])
    assert method_of(model).thresholds == pytest.approx([0.1, 0.1, 0.2, 0.2])


@torch.no_grad()
def test_given_thresholds_are_of_each_span():
    model, ids = spans().eval(), tokens()
    low, high = float("-inf"), float("inf")
    work = model(ids, execution="hard", thresholds=torch.tensor([high, high, low, low])).trace.work
    assert not work[1:3].any()
    assert work[4:6].all()


def test_a_draft_runs_the_first_spans(tmp_path):
    method = SpanConfig(decide="rule", spans=2, length=2)
    run = train(tiny(tmp_path, method, n_layer=7, steps=1, eval_every=1, checkpoint_every=1), tmp_path / "run")
    found = draft_thresholds(load_model(run, torch.device("cpu")), run, 0.5)
    assert found == [float("-inf")] * 2 + [float("inf")] * 2


# --- training ---------------------------------------------------------------------------------------------------------


def test_losses_of_all_spans_are_added_up():
    model, ids = spans(LLAMA, decide="entropy").train(), tokens(8)
    out = model(ids[:, :-1], targets=ids[:, 1:])
    method = method_of(model)
    hidden, ctx = model.entering(ids[:, :-1], "hard")
    ctx, total = replace(ctx, targets=ids[:, 1:]), 0.0
    for span in method.spans:
        for block in method._before(span):
            hidden = block(hidden, ctx)
        ran = span.run(hidden, ctx, method._blocks_of_span(span))
        hidden, total = ran.hidden, total + ran.losses["entropy"].item()
    assert out.losses["entropy"].item() == pytest.approx(total, rel=1e-6)
    out.losses["entropy"].backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {"method.decider.head.weight", "method.further.0.decider.head.weight"}


def test_training_progress_reaches_all_spans():
    model = spans(decide="boundary", taught=0.5, anneal=0.5)
    for done, told, skipping in ((0.0, 1, 0.0), (0.25, 1, 0.375), (0.5, 0, 0.75)):
        method_of(model).set_progress(done)
        assert [float(span.told) for span in method_of(model).spans] == [told] * 2
        assert [float(span.skipping) for span in method_of(model).spans] == pytest.approx([skipping] * 2)


def test_the_first_span_has_the_names_of_the_only_one():
    """So runs with one span open, and their weights can start a model with more."""
    one, two = (build(RunConfig(model=CLASSIC, method=SpanConfig(length=2, spans=n))).state_dict() for n in (1, 2))
    assert one.keys() < two.keys()
    assert all(name.startswith("method.further.0.") for name in two.keys() - one.keys())


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "layers", "expected"),
    [
        ({}, 7, [(1, 6)]),
        ({"spans": 2}, 7, [(1, 3), (4, 6)]),
        ({"spans": 2, "between": 0}, 7, [(1, 3), (3, 5)]),
        ({"spans": 3, "begin": 2, "length": 1, "between": 2}, 12, [(2, 3), (5, 6), (8, 9)]),
        ({"spans": 2, "begin": 0}, 3, [(0, 1), (2, 3)]),
    ],
)
def test_where_spans_are(knobs, layers, expected):
    assert SpanConfig(**knobs).ranges(layers) == [range(*one) for one in expected]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"spans": 0}, "method.spans is 0; expected a number from 1 to 1000"),
        ({"between": -1}, "method.between is -1; expected a number from 0 to 1000"),
        ({"spans": 2, "bypass": True, "carry": "none"}, "method.spans is 2; expected 1, since a bypass is fitted"),
    ],
)
def test_options_that_make_no_sense(knobs, said):
    with pytest.raises(UserError, match=said):
        SpanConfig(**knobs)


def test_spans_that_do_not_fit():
    with pytest.raises(UserError, match=r"n_layer is 7; expected at least 8, since the last span has blocks 5 to 7"):
        build(RunConfig(model=CLASSIC, method=SpanConfig(spans=2, length=3)))
