"""The engine: each request gets the tokens of full forward passes on it alone, whatever else runs or is cancelled.

Every method, with the classic and the Llama-style block, is compared with a reference without a cache, which
recomputes the whole text densely for every token. Tolerance: see test_contract.py.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_contract import CASES, TIME, VOCABULARY, lively, tokens
from tests.tiny import one_line
from tokendepth.config import method_name
from tokendepth.data import CharTokenizer
from tokendepth.errors import UserError
from tokendepth.infer.engine import Engine, Request
from tokendepth.infer.sampling import Choice, Sampler, Sampling, choose
from tokendepth.methods import METHODS, Method
from tokendepth.model import LanguageModel
from tokendepth.ops.few_rows import eager as few_rows

TOKENIZER = CharTokenizer("abcdefghijk")
ROUNDING = 1e-5

EVERY_METHOD = [case for case in CASES if case.removesuffix(" modern") in METHODS]
each_method = pytest.mark.parametrize("case", EVERY_METHOD)
each_case = pytest.mark.parametrize(
    "case", [case if case in EVERY_METHOD else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
each_dial = pytest.mark.parametrize(
    "case",
    [c for c in EVERY_METHOD if METHODS[method_name(CASES[c])].live_thresholds is not Method.live_thresholds],
)


@dataclass(frozen=True)
class Ask:
    """A request: the first `length` tokens of a row, and how to continue them."""

    row: int
    length: int
    tokens: int | None
    sampling: Sampling

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(tokens(8, seed=3)[self.row, : self.length].tolist())

    def submit(self, engine: Engine, **options) -> Request:
        return engine.submit(self.prompt, self.sampling, max_tokens=self.tokens, **options)


ASKS = (  # in a context of 16 tokens
    Ask(0, 5, 6, Sampling(temperature=0, logprobs=3)),
    Ask(1, 1, 4, Sampling(temperature=0.8, seed=1, logprobs=3)),
    Ask(2, 9, None, Sampling(temperature=1.5, seed=2, top_k=7, top_p=0.95, min_p=0.01, logprobs=3)),  # fills it
    Ask(3, 3, 5, Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=3)),
    Ask(4, TIME, 5, Sampling(temperature=1, seed=4, logit_bias={3: 2.0}, logprobs=3)),  # there is room for one token
)


@dataclass(frozen=True)
class Written:
    choices: list[Choice]
    depth: list[list[float]]
    """For each token, the work at the position that predicted it."""


@torch.no_grad()
def alone(model: LanguageModel, ask: Ask, thresholds: torch.Tensor | None = None) -> Written:
    """The reference: no cache, the whole text is recomputed densely for every token."""
    ids, found = list(ask.prompt), Written([], [])
    sampler = Sampler(ask.sampling, ids, VOCABULARY, torch.device("cpu"))
    for _ in range(min(ask.tokens or TIME, TIME - ask.length + 1)):
        out = model(torch.tensor([ids]), execution="hard", thresholds=thresholds)
        found.choices.extend(choose(out.logits[:, -1], [sampler]))
        found.depth.append(out.trace.work[:, 0, -1].float().tolist())
        ids.append(found.choices[-1].token)
    return found


@cache
def reference(case: str) -> list[Written]:
    return [alone(lively(case), ask) for ask in ASKS]


def finish(engine: Engine) -> None:
    steps = 0
    while not engine.idle:
        assert engine.step(), "a step writes"
        steps += 1
        assert steps < 1000


def check(request: Request, expected: Written) -> None:
    assert [token.choice.token for token in request.tokens] == [choice.token for choice in expected.choices]
    for token, choice, depth in zip(request.tokens, expected.choices, expected.depth, strict=True):
        assert token.choice.logprob == pytest.approx(choice.logprob, abs=1e-4)
        assert [t for t, _ in token.choice.top] == [t for t, _ in choice.top]
        assert token.depth == depth
    assert request.text == TOKENIZER.decode(choice.token for choice in expected.choices)


def as_new(engine: Engine) -> bool:
    kept = engine.cache
    states = kept.states.values()
    return not (kept.lengths.any() or kept.valid[..., :-1].any() or any(state.any() for state in states))


# --- every method -----------------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize(
    ("execution", "fixed", "slots"), [("hard", False, 2), ("sparse", False, 5), ("sparse", True, 3)]
)
def test_requests_together_are_written_as_each_alone(case, execution, fixed, slots):
    """Also with more requests than slots, in reused slots, with fixed and with variable shapes."""
    engine = Engine(lively(case), TOKENIZER, slots=slots, execution=execution, fixed=fixed)
    requests = [ask.submit(engine) for ask in ASKS]
    engine.step()
    assert len(engine.running) + engine.waiting + sum(r.reason is not None for r in requests) == len(ASKS)
    assert all(len(request.tokens) == 1 for request in engine.running)
    finish(engine)
    for request, expected in zip(requests, reference(case), strict=True):
        check(request, expected)
        assert request.reason == "length"
    assert as_new(engine)


@each_method
def test_a_cancelled_request_leaves_no_trace(case):
    """Cancel a running and a waiting request: the others, and the next one in the slot, are not affected."""
    engine = Engine(lively(case), TOKENIZER, slots=2)
    gone, stays, never, last = (ASKS[n].submit(engine) for n in (2, 0, 1, 3))
    for _ in range(3):
        engine.step()
    engine.cancel(gone)
    engine.cancel(never)
    assert (gone.reason, len(gone.tokens), never.reason, never.tokens) == ("cancelled", 3, "cancelled", [])
    assert engine.running == [stays]
    finish(engine)
    for request, which in ((stays, 0), (last, 3)):
        check(request, reference(case)[which])
    assert [t.choice.token for t in gone.tokens] == [c.token for c in reference(case)[2].choices[:3]]
    engine.cancel(stays)
    assert stays.reason == "length", "what has ended stays as it is"
    assert as_new(engine)


@each_method
def test_a_text_that_rolls_goes_on_from_the_last_half_of_the_context(case):
    model = lively(case)
    engine = Engine(model, TOKENIZER, slots=1)
    prompt = tokens(1, 10, seed=5)[0].tolist()
    request = engine.submit(prompt, Sampling(0), max_tokens=2 * TIME, rolls=True)
    finish(engine)
    begins, ids = 0, list(prompt)
    with torch.no_grad():
        for token in request.tokens:
            if len(ids) - begins > TIME:
                begins = len(ids) - TIME // 2
            logits = model(torch.tensor([ids[begins:]]), execution="sparse").logits[0, -1]
            assert logits.max() - logits[token.choice.token] <= ROUNDING * logits.abs().max()
            ids.append(token.choice.token)
    assert begins > TIME
    computed = [token.trace.work.shape[2] for token in request.tokens]
    assert computed == [10, *[1] * 6, TIME // 2, *[1] * 8, TIME // 2, *[1] * 8, TIME // 2, *[1] * 6][: 2 * TIME]


@each_dial
@pytest.mark.parametrize("fixed", [False, True])
def test_every_request_may_have_a_budget_of_its_own(case, fixed):
    """Its own thresholds, next to requests with the method's."""
    model = lively(case)
    own = model.method.live_thresholds()
    assert own is not None
    shifted = [(own + shift).tolist() for shift in (-0.3, 0.3)]
    engine = Engine(model, TOKENIZER, slots=3, fixed=fixed)
    asks = (ASKS[0], ASKS[0], ASKS[3], ASKS[1])
    given = (shifted[0], None, shifted[1], shifted[1])
    requests = [ask.submit(engine, thresholds=each) for ask, each in zip(asks, given, strict=True)]
    finish(engine)
    for request, ask, each in zip(requests, asks, given, strict=True):
        check(request, alone(model, ask, None if each is None else torch.tensor(each)))


# --- any order of events ----------------------------------------------------------------------------------------------


@cache
def written(row: int, length: int, seed: int) -> Written:
    return alone(lively("tsa modern"), Ask(row, length, None, Sampling(temperature=0.9, seed=seed, logprobs=1)))


EVENT = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 3), st.sampled_from([1, 4, 11, 16]), st.integers(1, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("step")),
)


@given(events=st.lists(EVENT, max_size=25), slots=st.integers(1, 3), fixed=st.booleans())
def test_in_any_order_of_events_a_request_gets_its_own_tokens(events, slots, fixed):
    engine = Engine(lively("tsa modern"), TOKENIZER, slots=slots, fixed=fixed)
    requests: list[tuple[Request, Written]] = []
    for event in events:
        if event[0] == "submit":
            _, row, length, most = event
            ask = Ask(row, length, most, Sampling(temperature=0.9, seed=row, logprobs=1))
            requests.append((ask.submit(engine), written(row, length, row)))
        elif event[0] == "step":
            engine.step()
        elif event[1] < len(requests):
            engine.cancel(requests[event[1]][0])
    finish(engine)
    for request, expected in requests:
        count = len(request.tokens)
        check(request, Written(expected.choices[:count], expected.depth[:count]))
        whole = min(request.max_tokens, len(expected.choices))
        assert count == whole if request.reason == "length" else (request.reason == "cancelled" and count < whole)
    assert as_new(engine)


# --- what ends a request ----------------------------------------------------------------------------------------------


def test_a_stop_string_ends_it_across_tokens_and_frees_its_slot():
    engine = Engine(lively("dense"), TOKENIZER, slots=1)
    whole = ASKS[0].submit(engine)
    finish(engine)
    stop = whole.text[2:4]
    request, other = ASKS[0].submit(engine, stop=[stop]), ASKS[1].submit(engine)
    finish(engine)
    assert whole.text.index(stop) == 2, "nothing stops it earlier"
    assert (request.reason, request.text, len(request.tokens)) == ("stop", whole.text[:2], 4)
    assert [token.text for token in request.tokens][2:] == ["", ""], "no part of it is shown"
    check(other, reference("dense")[1])


def test_a_stop_token_ends_it_and_is_not_shown():
    engine = Engine(lively("dense"), TOKENIZER, slots=1)
    expected = [choice.token for choice in reference("dense")[0].choices]
    last = expected.index(expected[3])
    request = ASKS[0].submit(engine, stop_ids=[expected[3]])
    finish(engine)
    assert (request.reason, len(request.tokens)) == ("stop", last + 1)
    assert request.text == TOKENIZER.decode(expected[:last])


def test_the_tokenizers_own_end_of_text_ends_it():
    class Ending(CharTokenizer):
        stops = (reference("dense")[0].choices[3].token,)

    expected = [choice.token for choice in reference("dense")[0].choices]
    request = ASKS[0].submit(engine := Engine(lively("dense"), Ending(TOKENIZER.chars), slots=1))
    finish(engine)
    assert (request.reason, len(request.tokens)) == ("stop", expected.index(expected[3]) + 1)


def test_tokens_that_only_pad_the_models_vocabulary_are_never_written():
    engine = Engine(lively("dense"), CharTokenizer("abcd"), slots=2)
    requests = [engine.submit([1], Sampling(5, seed=seed, logprobs=9), max_tokens=15) for seed in range(2)]
    finish(engine)
    choices = [token.choice for request in requests for token in request.tokens]
    assert {choice.token for choice in choices} == {0, 1, 2, 3}
    assert all(len(choice.top) == 4 for choice in choices)


def test_what_might_have_become_a_stop_string_is_shown_at_the_end():
    engine = Engine(lively("dense"), TOKENIZER, slots=1)
    text = TOKENIZER.decode(choice.token for choice in reference("dense")[0].choices)
    request = ASKS[0].submit(engine, stop=[text + "a"])
    finish(engine)
    assert (request.reason, request.text) == ("length", text)
    assert [token.text for token in request.tokens] == ["", "", "", "", "", text]


# --- streaming and cost -----------------------------------------------------------------------------------------------


def test_a_stream_can_be_read_twice_and_beside_others():
    engine = Engine(lively("tsa"), TOKENIZER, slots=2)
    first, second = ASKS[0].submit(engine), ASKS[3].submit(engine)
    one, two = engine.stream(first), engine.stream(second)
    read = [next(one), next(two), next(two)]
    assert (len(first.tokens), len(second.tokens)) == (2, 2), "they advance together"
    assert [read[0], *one] == list(engine.stream(first)) == first.tokens
    check(second, reference("tsa")[3])


def test_a_token_knows_what_it_cost():
    """The first token has the trace of the whole prompt, the others that of one position."""
    model = lively("tsa")
    engine = Engine(model, TOKENIZER, slots=2)
    requests = [ASKS[0].submit(engine), ASKS[1].submit(engine)]
    finish(engine)
    first, *others = requests[0].tokens
    assert first.trace.work.shape == (3, 1, 5)
    assert all(token.trace.work.shape == (3, 1, 1) for token in others)
    for token in requests[0].tokens:
        column, site = np.array(token.depth), token.trace.sites
        assert token.active_fraction == pytest.approx(column[1:].mean())
        routed = np.array([s.active * w for s, w in zip(site, column, strict=True)]).sum()
        fixed = token.trace.outside + sum(s.always + s.router for s in site)
        dense = token.trace.outside + sum(s.always + s.active for s in site)
        assert token.flops_share == pytest.approx((routed + fixed) / dense)
    with torch.no_grad():
        work = model(torch.tensor([ASKS[0].prompt]), execution="sparse").trace.work
    assert np.array_equal(first.trace.work[:, 0], work[:, 0].numpy())


def test_in_a_fixed_engine_every_decoding_pass_has_the_same_shape(monkeypatch):
    model, shapes = lively("budget modern"), []
    engine = Engine(model, TOKENIZER, slots=3, fixed=True)
    forward = LanguageModel.forward

    def watched(self, ids, *, cache, **options):
        out = forward(self, ids, cache=cache, **options)
        shapes.append((*ids.shape, out.trace.sites))
        return out

    monkeypatch.setattr(LanguageModel, "forward", watched)
    for ask in ASKS:
        ask.submit(engine)
    finish(engine)
    assert len({shape for shape in shapes if shape[1] == 1 and shape[0] == 3}) == 1
    assert {shape[1] for shape in shapes} <= {1, 4, 8, 16}, "prompts in powers of two"


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([0] * 17, {}, "the prompt has 17 tokens, but this model's context is 16; give fewer"),
        ([11], {}, "token id 11 is out of range; expected 0 to 10, this model's vocabulary"),
        ([-1], {}, "token id -1 is out of range; expected 0 to 10"),
        ([1], {"stop_ids": [99]}, "token id 99 is out of range; expected 0 to 10"),
        ([1], {"sampling": Sampling(logit_bias={-4: 1.0})}, "token id -4 is out of range; expected 0 to 10"),
        ([1], {"max_tokens": 0}, "tokens is 0; expected a number from 1 to 1000000000"),
        ([1], {"stop": ["a", ""]}, "a stop string is empty"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_one_line(prompt, options, said):
    engine = Engine(lively("dense"), TOKENIZER, slots=1)
    with pytest.raises(UserError) as error:
        engine.submit(prompt, **options)
    assert said in one_line(error.value)
    assert engine.idle


def test_an_engine_of_no_slots_is_refused():
    with pytest.raises(UserError, match="slots is 0; expected a number from 1 up"):
        Engine(lively("dense"), TOKENIZER, slots=0)


# --- weights that are kept packed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["plentiful", "short"])
@each_method
def test_several_requests_use_packed_weights_where_memory_is_plentiful(case, memory, monkeypatch):
    monkeypatch.setattr(few_rows, "SMALLEST", 0)
    monkeypatch.setattr(few_rows, "PATIENCE", 0)
    model, packed = lively(case), []
    size = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr("tokendepth.infer.engine.memory_bytes", lambda _: 4 * size - (memory == "short"))
    of = few_rows.PackedMatrices.of
    monkeypatch.setattr(
        few_rows.PackedMatrices, "of", lambda self, matrix: packed.append(of(self, matrix)) or packed[-1]
    )
    engine = Engine(model, TOKENIZER, slots=len(ASKS))
    requests = [ask.submit(engine) for ask in ASKS]
    finish(engine)
    for request, expected in zip(requests, reference(case), strict=True):
        check(request, expected)
    assert any(found is not None for found in packed) == (memory == "plentiful")
