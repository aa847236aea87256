"""Self-speculation: the tokens or the distribution of plain decoding, and the reported cost of drafting.

Draft lengths are forced to change from step to step, so that drafts are kept fully, partly and not at all. How many
tokens a request would draft by itself is tested in test_drafting.py.
"""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tokendepth as td
from tests.infer.test_drafting import chi_square
from tests.infer.test_engine import ASKS, ROUNDING, TOKENIZER, Ask, alone, as_new, check, finish
from tests.test_contract import CASES, TIME, VOCABULARY, lively, tokens
from tests.tiny import one_line, tiny
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DenseConfig, EarlyExitConfig, RunConfig, SpanConfig, method_name
from tokendepth.data import CharTokenizer
from tokendepth.infer import speculation
from tokendepth.infer.capture import CapturedPass
from tokendepth.infer.differences import greedy_differences
from tokendepth.infer.drafting import Pace, Speculation
from tokendepth.infer.engine import Engine
from tokendepth.infer.requests import on_host
from tokendepth.infer.sampling import Sampler, Sampling, probabilities
from tokendepth.infer.speculation import SpeculativeEngine, draft_thresholds
from tokendepth.measure.evaluate import load_model
from tokendepth.measure.flops import count_flops
from tokendepth.methods import METHODS, build
from tokendepth.model import LanguageModel
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


def drafts(case: str) -> bool:
    method = METHODS[method_name(CASES[case])]
    return method.decides_by_threshold and case.removesuffix(" modern") != "dense"


def is_quick(case: str) -> bool:
    """The methods with a dial or exits, with both kinds of block."""
    return case.removesuffix(" modern") in ("budget", "span", "early_exit")


DRAFTING = [case for case in CASES if drafts(case)]
each_case = pytest.mark.parametrize(
    "case", [case if is_quick(case) else pytest.param(case, marks=pytest.mark.slow) for case in DRAFTING]
)
each_quick_case = pytest.mark.parametrize("case", [case for case in DRAFTING if is_quick(case)])

GREEDY = [
    Ask(0, 5, 6, Sampling(temperature=0, logprobs=3)),
    Ask(5, 2, None, Sampling(temperature=0, logprobs=1)),  # fills the context
    Ask(3, 3, 9, Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=3)),
    Ask(6, TIME - 1, 5, Sampling(temperature=0, logprobs=0)),  # there is room for two tokens
]


def skipping(model: LanguageModel) -> list[float]:
    """Thresholds for drafts that skip everything they can."""
    return [math.inf] * sum(site.routed for site in model.method.sites(keys=1))


def drafting_engine(model: LanguageModel, draft: list[float] | None = None, **options) -> SpeculativeEngine:
    return SpeculativeEngine(model, TOKENIZER, skipping(model) if draft is None else draft, **options)


@pytest.fixture(autouse=True)
def _lengths_that_change(monkeypatch):
    """Drafts of 3, 1, 0, 4, 2 tokens and so on, if there is room."""
    plans: dict[Speculation, itertools.cycle] = {}

    def planned(self: Speculation, room: int) -> int:
        return max(0, min(room, next(plans.setdefault(self, itertools.cycle((3, 1, 0, 4, 2))))))

    monkeypatch.setattr(Speculation, "next_length", planned)


# --- greedy: token for token ------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize(("fixed", "slots"), [(False, 3), (True, 2)])
def test_greedy_text_is_that_of_the_full_model(case, fixed, slots):
    """Alone and with others; depth and log-probabilities equal those of dense passes without a cache."""
    model = lively(case)
    engine = drafting_engine(model, slots=slots, fixed=fixed)
    requests = [ask.submit(engine) for ask in GREEDY]
    finish(engine)
    for request, ask in zip(requests, GREEDY, strict=True):
        check(request, alone(model, ask))
        assert request.reason == "length"
    counts = [request.speculation for request in requests]
    assert all(each is not None and each.drafted >= each.accepted for each in counts)
    assert sum(each.drafted for each in counts if each) > 10
    assert as_new(engine)


def replayed(function, device, restore=lambda: None):
    """Imitates `captured` on a GPU: each call runs the function again and overwrites the previous result."""
    kept = function()
    restore()

    def replay():
        found = function()
        for old, new in ((kept.logits, found.logits), (kept.trace.work, found.trace.work)):
            old.copy_(new)
        return kept

    return replay


@each_quick_case
def test_captured_drafts_and_verifications_write_the_same_text(case, monkeypatch):
    monkeypatch.setattr("tokendepth.infer.capture.captured", replayed)
    for module in ("engine", "speculation"):  # a GPU would copy
        monkeypatch.setattr(f"tokendepth.infer.{module}.on_host", lambda trace: copy.deepcopy(on_host(trace)))
    model = lively(case)
    engine = drafting_engine(model, slots=2, fixed=True)
    engine._captured = CapturedPass(engine._decode_all, engine.cache)
    engine._captured_verifying = CapturedPass(engine._verify_all, engine.cache, engine._width)
    asks = [*GREEDY, Ask(1, 2, None, Sampling(temperature=0.9, seed=3, logprobs=0))]
    requests = [ask.submit(engine) for ask in asks]
    finish(engine)
    for request, ask in zip(requests, GREEDY, strict=False):
        check(request, alone(model, ask))
    plain = drafting_engine(model, slots=2)
    drawn = asks[-1].submit(plain)
    finish(plain)
    assert requests[-1].ids == drawn.ids
    assert len(engine._captured_verifying._steps) == 1, "one graph serves all lengths"
    assert as_new(engine)


@each_quick_case
def test_drafts_of_the_full_model_itself_are_all_kept(case):
    """Greedy or sampled: if the two distributions are the same, nothing is ever rejected."""
    model = lively(case)
    sites = sum(site.routed for site in model.method.sites(keys=1))
    live = model.method.live_thresholds()
    engine = drafting_engine(model, [0.0] * sites if live is None else live.tolist(), slots=2)
    asks = [GREEDY[1], Ask(1, 2, None, Sampling(temperature=0.9, seed=3))]
    requests = [ask.submit(engine) for ask in asks]
    finish(engine)
    for request in requests:
        found = request.speculation
        assert found is not None
        assert found.drafted == found.accepted == found.judged > 5
    assert len(requests[0].tokens) == TIME - 1


@each_quick_case
def test_a_text_that_outgrows_the_context_rolls_as_it_does_without_drafts(case):
    model, prompt = lively(case), tokens(1, 10, seed=5)[0].tolist()
    texts = []
    for engine in (Engine(model, TOKENIZER, slots=1), drafting_engine(model, slots=1)):
        request = engine.submit(prompt, Sampling(0), max_tokens=2 * TIME, rolls=True)
        finish(engine)
        texts.append(request)
    plain, drafted = texts
    assert plain.ids == drafted.ids
    assert [token.trace.work.shape[2] for token in plain.tokens] == [t.trace.work.shape[2] for t in drafted.tokens]


def test_requests_with_thresholds_of_their_own_are_verified_at_those():
    model = lively("budget modern")
    own = model.method.live_thresholds()
    assert own is not None
    engine = drafting_engine(model, slots=3)
    given = [(own - 0.3).tolist(), None, (own + 0.3).tolist()]
    requests = [GREEDY[1].submit(engine, thresholds=each) for each in given]
    finish(engine)
    for request, each in zip(requests, given, strict=True):
        check(request, alone(model, GREEDY[1], None if each is None else torch.tensor(each)))


# --- what ends a request, and its accounting --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"stop": True}, {"stop_ids": True}, {"max_tokens": 5}])
def test_a_request_ends_where_it_does_without_drafts(options):
    """In the middle of a draft: tokens kept beyond the end are not shown, and the slot is freed."""
    model, prompt = lively("budget"), list(GREEDY[1].prompt)

    def written(engine: Engine, **given):
        request = engine.submit(prompt, Sampling(0), **given)
        finish(engine)
        return request

    whole = written(Engine(model, TOKENIZER, slots=1))
    if "stop" in options:
        options = {"stop": [whole.text[1:3]]}
    elif "stop_ids" in options:
        options = {"stop_ids": [whole.tokens[2].choice.token]}
    # The draft is the full model, so every draft is kept and the end lies inside one.
    live = model.method.live_thresholds()
    assert live is not None
    engine = drafting_engine(model, live.tolist(), slots=1)
    plain, drafted = written(Engine(model, TOKENIZER, slots=1), **options), written(engine, **options)
    assert (drafted.reason, drafted.text, drafted.ids) == (plain.reason, plain.text, plain.ids)
    assert [token.text for token in drafted.tokens] == [token.text for token in plain.tokens]
    assert len(drafted.tokens) < len(whole.tokens)
    assert as_new(engine)


def test_a_cancelled_request_leaves_no_trace():
    model = lively("span")
    engine = drafting_engine(model, slots=2)
    gone, stays, last = (GREEDY[n].submit(engine) for n in (1, 2, 0))
    for _ in range(3):
        engine.step()
    engine.cancel(gone)
    finish(engine)
    check(stays, alone(model, GREEDY[2]))
    check(last, alone(model, GREEDY[0]))
    assert as_new(engine)


@pytest.mark.parametrize(
    "case", ["span modern", *(pytest.param(case, marks=pytest.mark.slow) for case in ("budget", "early_exit"))]
)
def test_every_flop_is_accounted_for(case):
    """FLOPs of tokens, drafts and rejected tokens add up to all executed FLOPs."""
    model = lively(case)
    engine = drafting_engine(model, slots=1)
    request = GREEDY[1].submit(engine)
    executed = count_flops(lambda: finish(engine))
    told = sum(token.trace.totals().flops + token.extra_flops for token in request.tokens)
    assert told == pytest.approx(executed, rel=1e-6)
    assert request.speculation is not None
    assert request.speculation.accepted < request.speculation.drafted, "something was rejected"


def test_tokens_of_one_step_share_its_time():
    model = lively("budget")
    live = model.method.live_thresholds()
    assert live is not None
    engine = drafting_engine(model, live.tolist(), slots=1)
    request = GREEDY[1].submit(engine)
    engine.step()
    assert engine.step() == [request]
    assert len(request.tokens) == 1 + 4
    assert len({token.seconds for token in request.tokens[1:]}) == 1


# --- drawn: the same distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["budget", "span modern"])
def test_a_seed_fixes_the_text_whatever_else_is_written(case):
    model = lively(case)
    ask = Ask(2, 4, None, Sampling(temperature=1.2, seed=2, top_k=7, top_p=0.95, min_p=0.01, frequency_penalty=0.2))
    written = []
    for slots, others in ((1, []), (1, []), (3, [GREEDY[0], ASKS[1]])):
        engine = drafting_engine(model, slots=slots)
        request, *_ = [each.submit(engine) for each in (ask, *others)]
        finish(engine)
        written.append(request.ids)
    assert written[0] == written[1] == written[2]
    engine = drafting_engine(model, slots=1)
    other = engine.submit(ask.prompt, Sampling(temperature=1.2, seed=3, top_k=7))
    finish(engine)
    assert other.ids != written[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["budget", "span modern", pytest.param("early_exit", marks=pytest.mark.slow)])
def test_drawn_tokens_have_the_distribution_of_the_full_model(case):
    """Chi-square on three tokens: the first comes from the prompt, the others from a draft of two."""
    model, texts, prompt = lively(case), 1500, list(GREEDY[0].prompt)
    ask = {"temperature": 0.9, "top_k": 6, "repetition_penalty": 1.2}
    engine = drafting_engine(model, slots=50)
    requests = [engine.submit(prompt, Sampling(seed=seed, **ask), max_tokens=4) for seed in range(texts)]
    finish(engine)
    counts, accepted = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY), 0
    for request in requests:
        counts[tuple(token.choice.token for token in request.tokens[:3])] += 1
        assert request.speculation is not None
        accepted += request.speculation.accepted
    assert 0.1 < accepted / texts < 1.9, "tokens were kept, and tokens were rejected"
    assert chi_square(counts, texts * triples(model, prompt, Sampling(**ask))) > 1e-4


@torch.no_grad()
def triples(model: LanguageModel, prompt: list[int], ask: Sampling) -> torch.Tensor:
    """`[first, second, third]`: the probability of every continuation by three tokens, from full passes."""

    def next_ones(texts: list[list[int]]) -> torch.Tensor:
        logits = model(torch.tensor(texts), execution="hard").logits[:, -1]
        rows = []
        for text, row in zip(texts, logits, strict=True):
            sampler = Sampler(ask, prompt, VOCABULARY, torch.device("cpu"))
            for token in text[len(prompt) :]:
                sampler.note(token)
            rows.append(sampler.adjusted(row))
        return probabilities(torch.stack(rows), [ask] * len(rows))

    alphabet = range(VOCABULARY)
    first = next_ones([prompt])[0]
    second = next_ones([[*prompt, a] for a in alphabet])
    third = next_ones([[*prompt, a, b] for a in alphabet for b in alphabet]).view(VOCABULARY, VOCABULARY, VOCABULARY)
    return first[:, None, None] * second[:, :, None] * third


# --- low precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["budget modern", "span", pytest.param("early_exit", marks=pytest.mark.slow)])
def test_in_bfloat16_a_token_that_differs_has_a_rival_within_rounding(case):
    model = copy.deepcopy(lively(case)).bfloat16()
    engine = drafting_engine(model, slots=8)
    requests = [engine.submit(row[:3].tolist(), Sampling(0)) for row in tokens(8, seed=7)]
    finish(engine)
    found = [difference for request in requests for difference in greedy_differences(engine, request)]
    assert all(difference.explained for difference in found)
    assert all(difference.gap >= 0 for difference in found)


def test_in_float32_no_token_differs_and_a_wrong_one_is_found():
    model = lively("budget modern")
    engine = drafting_engine(model, slots=1)
    request = engine.submit(list(GREEDY[1].prompt), Sampling(0, repetition_penalty=1.1))
    finish(engine)
    assert greedy_differences(engine, request) == []
    last = request.tokens[-1]
    wrong = (last.choice.token + 1) % VOCABULARY
    request.tokens[-1] = replace(last, choice=replace(last.choice, token=wrong))
    (found,) = greedy_differences(engine, request)
    assert (found.position, found.token, found.expected) == (len(request.tokens) - 1, wrong, last.choice.token)
    assert not found.explained
    assert found.rounding < ROUNDING * 100 < found.gap


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    methods = {
        "budget": BudgetConfig(budget=0.5),
        "span": SpanConfig(begin=1, length=1, budget=0.5),
        "dice": SpanConfig(begin=1, length=1, budget=0.5, decide="dice", carry="none"),
        "early_exit": EarlyExitConfig(),
        "dense": DenseConfig(),
    }
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: train(tiny(folder / name, config, steps=1, n_layer=6), folder / name / "run", show=False)
        for name, config in methods.items()
    }


@pytest.mark.parametrize(
    ("name", "speculate"), [("budget", True), ("budget", 0), ("span", True), ("span", 0.2), ("early_exit", True)]
)
def test_a_run_writes_the_same_text_with_drafts(runs, name, speculate):
    prompts = ["green bottles", "on"]
    plain = td.generate(runs[name], prompts, tokens=18, temperature=0, device="cpu")
    found = td.generate(runs[name], prompts, tokens=18, temperature=0, device="cpu", speculate=speculate)
    for one, other in zip(plain, found, strict=True):
        assert one.text == other.text
        assert other.speculation is not None
        assert other.speculation.drafted > 0
        assert one.speculation is None
        assert [token.depth for token in one.tokens()] == [token.depth for token in other.tokens()]
        assert other.spending.extra_flops > 0
    drawn = [td.generate(runs[name], "on", tokens=9, seed=5, device="cpu", speculate=speculate).text for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_drafts_work_on_the_share_that_was_named(runs):
    model = load_model(runs["budget"], torch.device("cpu"))
    own = model.method.thresholds
    thresholds = draft_thresholds(model, runs["budget"], 0.2)
    assert model.method.thresholds == own, "the model keeps its own"
    assert all(a > b for a, b in zip(thresholds, own, strict=True)), "fewer tokens are above"
    assert draft_thresholds(model, runs["budget"]) == thresholds
    assert draft_thresholds(model, runs["budget"], budget=0.2) == [math.inf] * 5, "auto, where 0.2 is the full budget"
    exits = load_model(runs["early_exit"], torch.device("cpu"))
    assert draft_thresholds(exits, runs["early_exit"]) == [-math.inf, *[math.inf] * 4]
    assert draft_thresholds(exits, runs["early_exit"], 0.6) == [*[-math.inf] * 3, *[math.inf] * 2]
    assert draft_thresholds(load_model(runs["dice"], torch.device("cpu")), runs["dice"]) == [math.inf]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("dense", {"speculate": True}, "is of method dense, which has no cheaper pass to draft with; drop --speculate"),
        ("budget", {"speculate": 0.5}, "--speculate is 0.5; expected auto, or a number from 0 to below 0.5"),
        ("budget", {"speculate": 0.3, "budget": 0.25}, "expected auto, or a number from 0 to below 0.25, the budget"),
        ("budget", {"speculate": -0.1}, "--speculate is -0.1; expected auto, or a number from 0"),
        ("early_exit", {"speculate": math.nan}, "--speculate is nan; expected auto, or a number from 0 to below 1"),
        ("dice", {"speculate": 0.1}, "--speculate is 0.1; expected auto or 0, since this span has one decision"),
        ("budget", {"speculate": True, "execution": "hard"}, "drafts by skipping, but execution is 'hard'"),
    ],
)
def test_a_mistake_is_one_line(runs, name, settings, said):
    with pytest.raises(td.UserError) as error:
        td.generate(runs[name], "on", device="cpu", **settings)
    assert said in one_line(error.value)


def test_a_run_without_thresholds_for_drafts_and_without_its_text_says_how_to_find_them(tmp_path):
    run = train(tiny(tmp_path, BudgetConfig(budget=0.5), steps=1), tmp_path / "run", show=False)
    (tmp_path / "corpus.txt").unlink()
    with pytest.raises(td.UserError) as error:
        td.generate(run, "on", device="cpu", speculate=0.15)
    said = one_line(error.value)
    assert "has no thresholds for drafts at 0.15; find them: tokendepth calibrate" in said
    assert "--budget 0.15 --corpus text:PATH, or draft with --speculate 0" in said
    assert td.generate(run, "on", tokens=3, device="cpu", speculate=0).text


def test_the_command_says_what_drafting_came_to(runs, capsys):
    line = ["generate", str(runs["budget"].path), "--prompt", "on", "--tokens", "20", "--temperature", "0"]
    main(line)
    plain = capsys.readouterr().out
    for value in ("auto", "0"):
        main([*line, "--speculate", value])
        found = capsys.readouterr()
        assert found.out == plain
        assert "[speculation: " in found.err
        assert "acceptance 0." in found.err or "acceptance 1." in found.err
    with pytest.raises(SystemExit):
        main([*line, "--speculate", "much"])
    assert "--speculate is 'much'; expected auto, or a share of tokens such as 0.2" in capsys.readouterr().err


# --- timing -----------------------------------------------------------------------------------------------------------


def timed_as(monkeypatch, **milliseconds: float) -> list[int]:
    """Pretend that passes take this long: `plain`, `draft`, and `verify` per token; counts measurements."""
    calls = []

    def fake(passes, repeats, device):
        calls.append(repeats)
        for run in passes.values():
            run()
        verify = {str(length): milliseconds["verify"] * (length + 1) for length in speculation.TIMED}
        return {name: [(milliseconds | verify)[name]] * repeats for name in passes}

    monkeypatch.setattr(speculation, "interleaved", fake)
    return calls


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("case", ["span", "budget modern", "early_exit"])
def test_the_pace_is_what_passes_take_beside_the_weights_that_they_read(case, fixed, monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path))
    calls = timed_as(monkeypatch, plain=2.0, draft=1.0, verify=3.0)
    engine = drafting_engine(lively(case), slots=2, fixed=fixed)
    engine.take_pace()
    assert as_new(engine)
    lengths = [length for length, _ in engine.pace.verify]
    assert lengths == [length for length in speculation.TIMED if length < TIME - 1]
    request = GREEDY[0].submit(engine)
    finish(engine)
    check(request, alone(engine.model, GREEDY[0]))
    assert request.speculation.pace is engine.pace
    again = drafting_engine(copy.deepcopy(lively(case)), slots=2, fixed=fixed)
    again.take_pace()
    assert again.pace == engine.pace
    assert len(calls) == 1, "remembered"
    drafting_engine(lively(case), slots=1, fixed=fixed).take_pace()
    assert len(calls) == 1 + fixed, "where all slots are computed at every step, their number counts"
    (tmp_path / "drafting.json").write_text("{")
    again.take_pace()
    assert len(calls) == 2 + fixed, "damaged"
    if case != "early_exit":  # its threshold is in the config
        again.model.method.set_thresholds([threshold + 1 for threshold in again.model.method.thresholds])
        again.take_pace()
        assert len(calls) == 3 + fixed, "another budget"


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("case", ["span", "budget", "budget modern", "early_exit"])
def test_where_time_is_what_is_read_all_factors_are_one(case, fixed, monkeypatch):
    """Each step is normalised by its own work."""
    engine = drafting_engine(lively(case), slots=2, fixed=fixed)
    weights, seen, real = Speculation(engine._sites, engine.model.head_flops).weights, [], engine._verified

    def spy(drafts, tokens):
        out, rows = real(drafts, tokens)
        seen.append(out.trace.work[:, rows[0], : tokens.shape[1]].amax(1).numpy())
        return out, rows

    def fake(steps, repeats, device):
        works = {}
        for name, run in steps.items():
            found = run()
            if name == "plain":
                works[name] = found[0].trace.work[:, 0, 0]
            elif name == "draft":
                works[name] = found[1][0].work[:, engine._computed([0])[1][0], 0].numpy()
            else:
                works[name] = seen[-1]
        return {name: [weights(work)] for name, work in works.items()}

    monkeypatch.setattr(engine, "_verified", spy)
    monkeypatch.setattr(speculation, "interleaved", fake)
    found = engine._measured_pace()
    assert [found["draft"], *(factor for _, factor in found["verify"])] == pytest.approx(
        [1.0] * (1 + len(found["verify"]))
    )


def test_a_cache_folder_that_cannot_be_written_costs_a_line_and_no_text(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "file"))
    calls = timed_as(monkeypatch, plain=2.0, draft=1.0, verify=3.0)
    engine = drafting_engine(lively("budget"), slots=1)
    for _ in range(2):
        engine.take_pace()
    assert len(calls) == 2
    assert engine.pace.verify
    told = capsys.readouterr().err.replace("\n", " ")
    assert told.count("could not be written, so this is measured again next time") == 2


@pytest.mark.parametrize("skips", [False, True])
def test_the_pace_by_hand(skips, monkeypatch, tmp_path):
    """All tokens take the span, or none, so verifying reads as much as a plain step; drafts skip it."""
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path))
    timed_as(monkeypatch, plain=2.0, draft=1.0, verify=3.0)
    model = copy.deepcopy(lively("span"))
    model.method.set_thresholds([math.inf if skips else -math.inf])
    engine = drafting_engine(model, slots=1)
    engine.take_pace()
    sites, head = model.method.sites(keys=0), model.head_flops
    read = [head + sum(site.always + site.router + site.active * active(site) for site in sites)
            for active in (lambda site: not site.routed, lambda site: True)]  # fmt: skip
    assert engine.pace.draft == pytest.approx(0.5 if skips else 0.5 * read[1] / read[0])
    routed = np.array([site.routed for site in sites])
    assert np.array(engine.pace.works).tolist() == [(~routed).tolist(), (~routed if skips else routed | True).tolist()]
    assert list(engine.pace.verify) == [(length, pytest.approx(1.5 * (length + 1))) for length, _ in engine.pace.verify]


def test_a_context_without_room_for_drafts_needs_no_clock(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path))
    calls = timed_as(monkeypatch, plain=2.0, draft=1.0, verify=3.0)
    model = build(RunConfig(model=replace(lively("budget").config, context=2), method=CASES["budget"])).eval()
    engine = drafting_engine(model, slots=1)
    engine.take_pace()
    assert (engine.pace, calls) == (Pace(works=((1.0,) * len(engine._sites),) * 2), [])


def test_tokens_that_only_pad_the_models_vocabulary_are_never_drafted():
    engine = SpeculativeEngine(lively("budget"), CharTokenizer("abcd"), skipping(lively("budget")), slots=2)
    requests = [engine.submit([1], Sampling(5, seed=seed, logprobs=9), max_tokens=15) for seed in range(2)]
    finish(engine)
    choices = [token.choice for request in requests for token in request.tokens]
    assert {choice.token for choice in choices} <= {0, 1, 2, 3}
    assert all(len(choice.top) == 4 for choice in choices)
