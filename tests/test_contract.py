"""The contract: the guarantees of every method. New entries in METHODS are tested here automatically.

Every method is tested with two kinds of block: the classic one (LayerNorm, learned positions, GELU, multi-head
attention) and a modern one (RMSNorm, rotary positions, SwiGLU, grouped heads, biases, query-key norm).

Tolerance: float32 rounds at 6e-8; over a few dozen operations with sums of at most 64 terms, that grows to about 1e-6
of the largest logit. So 1e-5 of it is rounding. A token that is missed, shifted or seen too early is not: it changes
logits by some percent here, since every matrix matters (`test_the_tolerance_tells_an_error_from_rounding`).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.faults.lively import enlivened, relative_error, routed_sites, with_router_logits
from tests.tiny import tiny
from tokendepth import data
from tokendepth.cache import KVCache
from tokendepth.config import (
    METHOD_CONFIGS,
    ACTConfig,
    BudgetConfig,
    EarlyExitConfig,
    ITTConfig,
    MethodConfig,
    MoDConfig,
    ModelConfig,
    MoRConfig,
    RunConfig,
    SpanConfig,
    SwitchConfig,
    TrainConfig,
    TSAConfig,
    method_name,
)
from tokendepth.data.dataset import NO_LOSS
from tokendepth.measure.calibrate import calibrate
from tokendepth.measure.evaluate import batches, load_model, measure
from tokendepth.measure.flops import count_flops
from tokendepth.methods import METHODS, build
from tokendepth.model import LanguageModel, Output
from tokendepth.runs.files import write_json
from tokendepth.runs.run import Run
from tokendepth.trace import EXECUTIONS
from tokendepth.training.loop import resolve
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep, learning_rate

TIME = 16
VOCABULARY = 11
SPELLINGS = [b" " if token % 2 else b"a" for token in range(VOCABULARY)]
MODEL = ModelConfig(
    d_model=32, n_layer=3, n_head=4, d_ff=64, context=TIME, dropout=0.1, vocab_size=VOCABULARY
)  # d_ff is not 4 d, so that no cost formula can rely on that

MODERN = ModelConfig(
    d_model=32, n_layer=3, n_head=4, d_ff=48, context=TIME, dropout=0.1, vocab_size=VOCABULARY,
    norm="rms", norm_eps=1e-6, positions="rotary", rope_base=500.0, n_kv_head=2, attention_bias="qkv", qk_norm=True,
    ffn="swiglu", ffn_bias=False, tie_head=False, embedding_scale=2.0,
)  # fmt: skip

CASES: dict[str, MethodConfig] = {name: METHOD_CONFIGS[name]() for name in METHODS if name in METHOD_CONFIGS}
CASES["tsa-ffn"] = TSAConfig(skip="ffn")
CASES["budget-plain"] = BudgetConfig(dial=False, distill=0)
CASES["budget-random"] = BudgetConfig(routing="random")
CASES["mod-router"] = MoDConfig(decides="router", every=1, capacity=0.5)
CASES["early_exit"] = EarlyExitConfig(threshold=0.4)  # untrained, no token reaches 0.9
CASES["early_exit-learned"] = EarlyExitConfig("learned")
CASES["switch"] = SwitchConfig(capacity_factor=0.75)  # some tokens overflow
CASES["act"] = ACTConfig(epsilon=0.2)  # at 0.01 hardly any token halts at the first step
CASES["mor-token"] = MoRConfig(routing="token")
CASES["mor-shared"] = MoRConfig(recursions=3, kv="shared")
CASES["mor-token-shared"] = MoRConfig(recursions=3, routing="token", kv="shared")
CASES["itt-router"] = ITTConfig(steps=2, every=1, decides="router")
CASES["span-boundary"] = SpanConfig(decide="boundary", carry="smooth", ratio_loss=0.0)
CASES["span-gain"] = SpanConfig(decide="gain", keys="all", carry="none")
CASES["span-entropy"] = SpanConfig(decide="entropy", budget=0.4)
CASES["span-dice"] = SpanConfig(decide="dice", budget=0.5, keys="all", carry="none")
CASES["span-width"] = SpanConfig(width=48)
CASES["span-two"] = SpanConfig(decide="boundary", carry="smooth", ratio_loss=0.0, spans=2)
# Every method, and the ways to run a block that the defaults do not use: given rows, given keys.
CLASSIC = list(CASES)
ON_MODERN = [*METHODS, "budget-plain", "budget-random", "mor-token-shared"]
CASES |= {f"{name} modern": CASES[name] for name in ON_MODERN if name in CASES}
CASES["span-ratio modern"] = SpanConfig(decide="boundary")  # untrained, neighbours of the classic block are too alike
CASES["span-kl modern"] = SpanConfig(decide="gain", gain="kl", keys="all", carry="none")
CASES["budget-update modern"] = BudgetConfig(dial=False, distill=0, learn="update", shares="0.6,0.3", budget=0.4)
CASES["span-bypass modern"] = SpanConfig(decide="gain", gain="kl", keys="all", carry="none", bypass=True, budget=0.4)
# With these two, every router that `retrofit` offers is a case.
CASES["span-straight modern"] = SpanConfig(learn="straight", keys="all", carry="none")
CASES["budget-straight modern"] = BudgetConfig(dial=False, distill=0, learn="straight")
CASES["span-rule modern"] = SpanConfig(decide="rule", budget=0.5)
CASES["span-two modern"] = SpanConfig(spans=2)
CASES["span-two-all modern"] = SpanConfig(decide="gain", keys="all", carry="none", spans=2, between=0)
DEPTH = {"mor": 4, "mor-token": 6, "mor-shared": 5, "mor-token-shared": 5}
DEPTH |= {case.removesuffix(" modern"): 5 if "two" in case else 4 for case in CASES if case.startswith("span")}
"""Cases for which three layers are too few."""
SPREAD = {"act": 2.0}
"""The spread of router logits. To halt at the first step, a token needs a larger logit than to skip a block."""
ACTIVE = ("none", "one", "some", "all")

each_case = pytest.mark.parametrize("case", CASES)
each_run = pytest.mark.parametrize(
    ("case", "execution"),
    [
        (case, execution)
        for case, config in CASES.items()
        for execution in EXECUTIONS
        if execution != "soft" or METHODS[method_name(config)].has_soft
    ],
)
# Tests that take most of a second per case are run with the Llama-style block only by `make test-all`.
each_case_slowly = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case.endswith(" modern") else case for case in CASES]
)
# Tests that do not depend on the kind of block are run with one of them.
ONLY_MODERN = [case for case in CASES if case.removesuffix(" modern") not in CASES]
each_way_to_decide = pytest.mark.parametrize(
    "case", [*CLASSIC, *(pytest.param(case, marks=pytest.mark.slow) for case in ONLY_MODERN)]
)
# Even slower tests are run with the classic block, except for cases covered by others, and with the Llama-style block
# for every way to run it: rows by a mask, given rows, given keys, rows packed into a shorter sequence.
IN_OTHERS = ("budget-random", "mor-token", "mor-shared", "span-dice")
AT_LENGTH = [case for case in CLASSIC if case not in IN_OTHERS]
EVERY_WAY = [f"{name} modern" for name in ("tsa", "budget-plain", "mor-token-shared", "span")]
each_case_at_length = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) for case in (*AT_LENGTH, *EVERY_WAY)]
)
each_active = pytest.mark.parametrize("active", ACTIVE)
# Only in sparse execution does the cost depend on the number of active tokens.
each_cost = pytest.mark.parametrize(
    ("case", "execution", "active"),
    [
        (case, execution, active)
        for case, config in CASES.items()
        for execution in EXECUTIONS
        if execution != "soft" or METHODS[method_name(config)].has_soft
        for active in (ACTIVE if execution == "sparse" else ("some",))
    ],
)


def model_of(case: str) -> ModelConfig:
    """The smallest depth at which a method can share or skip something."""
    model = MODERN if case.endswith(" modern") else MODEL
    return replace(model, n_layer=DEPTH.get(case.removesuffix(" modern"), model.n_layer))


def run_config(case: str, seed: int = 0) -> RunConfig:
    return RunConfig(model=model_of(case), method=CASES[case], train=TrainConfig(seed=seed))


@cache
def lively(case: str) -> LanguageModel:
    """Untrained, but every matrix matters, and every site processes about half of the tokens. Shared: do not modify."""
    models = (
        enlivened(
            build(run_config(case, seed), SPELLINGS).eval(), tokens(64), SPREAD.get(case.removesuffix(" modern"), 1.0)
        )
        for seed in range(50)
    )
    return next(model for model in models if all(0.2 <= fraction <= 0.8 for fraction in fractions(model)))


def fractions(model: LanguageModel) -> list[float]:
    """The share of tokens processed at each routed site."""
    return full(model, tokens(64), "hard").trace.work[routed_sites(model)].mean((1, 2)).tolist()


def tokens(batch: int, time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def given_decisions(model: LanguageModel, ids: Tensor, active: str) -> Tensor | None:
    """`[routed site, batch, time]`; None for a method that decides nothing."""
    shape = (len(routed_sites(model)), *ids.shape)
    if not shape[0]:
        return None
    decisions = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < {"some": 0.4, "all": 1}.get(active, 0)
    if active == "one":
        decisions[:, -1, ids.shape[1] // 2] = True
    together = model.method.sites_per_decision
    return decisions[::together].repeat_interleave(together, 0)


@torch.no_grad()
def full(model: LanguageModel, ids: Tensor, execution: str, **options) -> Output:
    return model(ids, execution=execution, **options)


def new_cache(model: LanguageModel, batch: int, capacity: int = TIME) -> KVCache:
    layers = model.method.cache_layers
    return KVCache(model.config, batch, capacity, layers=layers, like=model.norm.weight.detach())


def decode(
    model: LanguageModel, ids: Tensor, chunks: tuple[int, ...], execution: str, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits and work of `ids`, decoded with a cache chunk by chunk; `valid` belongs to the first chunk."""
    kept, logits, work = new_cache(model, len(ids), sum(chunks)), [], []
    for part in ids.split(list(chunks), dim=1):
        out = full(model, part, execution, cache=kept, valid=valid)
        valid = None
        logits.append(out.logits)
        work.append(out.trace.work)
    return torch.cat(logits, 1), torch.cat(work, 2)


def assert_equal_to_rounding(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= 1e-5


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], execution: str) -> None:
    """Compares logits and work. In hard and sparse execution work consists of decisions, which must be equal."""
    assert_equal_to_rounding(actual[0], expected[0])
    if execution == "soft":
        assert_equal_to_rounding(actual[1], expected[1])
    else:
        assert torch.equal(actual[1], expected[1])


def test_every_method_has_a_config_and_every_config_a_method():
    assert METHODS.keys() == METHOD_CONFIGS.keys()


@each_case
def test_the_models_under_test_decide_both_ways(case):
    """Otherwise the equalities below would hold because nothing is skipped."""
    assert all(0.2 <= fraction <= 0.8 for fraction in fractions(lively(case)))


@each_run
def test_the_tolerance_tells_an_error_from_rounding(case, execution):
    model, ids = lively(case), tokens(8)
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    before, after = full(model, ids, execution), full(model, other, execution)
    for time in (4, 5, TIME - 1):  # the token itself, the next one, the farthest one
        assert relative_error(after.logits[:, time], before.logits[:, time]) > 1e-3


@each_case
def test_soft_is_hard_where_nothing_is_softer(case):
    """So that the tests below need not check it again."""
    model, ids = lively(case), tokens(8)
    soft, hard = (full(model, ids, execution) for execution in ("soft", "hard"))
    assert torch.equal(soft.logits, hard.logits) != model.method.has_soft
    assert torch.equal(soft.trace.work, hard.trace.work) != model.method.has_soft
    assert (soft.trace.execution, hard.trace.execution) == ("soft", "hard")
    assert soft.trace.totals().flops == hard.trace.totals().flops


# --- 1. causal --------------------------------------------------------------------------------------------------------


@each_run
@pytest.mark.parametrize("seed", [0, 1])
def test_the_future_changes_nothing(case, execution, seed):
    """One sequence for each position from which on all tokens are changed."""
    model, ids, cuts = lively(case), tokens(TIME - 1, seed=seed), range(1, TIME)
    future = torch.arange(TIME) >= torch.tensor(cuts)[:, None]
    other = torch.where(future, (ids + 1 + tokens(TIME - 1, seed=seed + 2) % 10) % VOCABULARY, ids)
    assert torch.equal(other != ids, future)
    before, after = full(model, ids, execution), full(model, other, execution)
    for b, cut in enumerate(cuts):
        actual = after.logits[b, :cut], after.trace.work[:, b, :cut]
        assert_same(actual, (before.logits[b, :cut], before.trace.work[:, b, :cut]), execution)


# --- 2. cached = full, batched = single, padded = unpadded ------------------------------------------------------------


@each_run
@pytest.mark.parametrize("chunks", [(7, *[1] * 9), (3, 5, 8), (1,) * TIME], ids=["prefill+ones", "chunks", "ones"])
def test_cached_decoding_equals_the_full_forward(case, execution, chunks):
    model, ids = lively(case), tokens(4, seed=2)
    expected = full(model, ids, execution)
    assert_same(decode(model, ids, chunks, execution), (expected.logits, expected.trace.work), execution)


@each_run
def test_batched_equals_single(case, execution):
    model, ids = lively(case), tokens(5, seed=3)
    batched = full(model, ids, execution)
    for b in range(len(ids)):
        single = full(model, ids[b : b + 1], execution)
        actual = batched.logits[b : b + 1], batched.trace.work[:, b : b + 1]
        assert_same(actual, (single.logits, single.trace.work), execution)


@each_run
def test_one_place_can_be_read_alone(case, execution):
    """As for prompts, of which only the last logits are needed; FLOPs that are not executed are not counted."""
    model, ids = lively(case), tokens(4, seed=3)
    places, whole = torch.tensor([0, 5, TIME - 1, 3]), full(model, ids, execution)
    dispatched = count_flops(lambda: full(model, ids, execution, read=places))
    alone = full(model, ids, execution, read=places)
    assert alone.trace.totals().flops == pytest.approx(dispatched, rel=1e-6)
    expected = whole.logits[torch.arange(4), places][:, None]
    assert_same((alone.logits, alone.trace.work), (expected, whole.trace.work), execution)


def left_padded(ids: Tensor, lengths: tuple[int, ...], width: int, pad: int) -> tuple[Tensor, Tensor]:
    """The first tokens of each row, right-aligned in `width` columns, and which columns hold them."""
    padded = torch.full((len(lengths), width), pad)
    for b, length in enumerate(lengths):
        padded[b, width - length :] = ids[b, :length]
    valid = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return padded, valid


@each_run
@pytest.mark.parametrize("pad", [0, 7])
def test_left_padding_changes_nothing(case, execution, pad):
    model, ids, lengths = lively(case), tokens(4, seed=4), (TIME, 11, 3, 1)
    padded, valid = left_padded(ids, lengths, TIME, pad)
    out = full(model, padded, execution, valid=valid)
    assert out.trace.totals().tokens == sum(lengths)
    assert out.logits.isfinite().all(), "also at padding, which sees nothing but itself"
    for b, length in enumerate(lengths):
        single = full(model, ids[b : b + 1, :length], execution)
        actual = out.logits[b : b + 1, -length:], out.trace.work[:, b : b + 1, -length:]
        assert_same(actual, (single.logits, single.trace.work), execution)


@each_run
def test_left_padding_changes_no_metric_and_no_auxiliary_loss(case, execution):
    model, ids = lively(case), tokens(1, 9, seed=5)
    padded, valid = left_padded(ids, (9,), TIME, 0)
    actual, expected = full(model, padded, execution, valid=valid), full(model, ids, execution)
    assert actual.losses.keys() == expected.losses.keys()
    for name, loss in expected.losses.items():
        assert float(actual.losses[name]) == pytest.approx(float(loss), rel=1e-5)
    assert actual.trace.totals().active_fraction == pytest.approx(expected.trace.totals().active_fraction, rel=1e-5)
    assert actual.trace.totals().tlops == pytest.approx(expected.trace.totals().tlops, rel=1e-5)


@each_run
@pytest.mark.parametrize("chunks", [(8, *[1] * 8), (8, 3, 5)], ids=["ones", "chunks"])
def test_cached_decoding_after_a_padded_prefill(case, execution, chunks):
    model, ids, lengths = lively(case), tokens(3, seed=6), (8, 5, 1)
    padded, valid = left_padded(ids, lengths, 8, pad=3)
    more = tokens(3, 8, seed=7)
    logits, work = decode(model, torch.cat([padded, more], 1), chunks, execution, valid)
    for b, length in enumerate(lengths):
        single = full(model, torch.cat([ids[b : b + 1, :length], more[b : b + 1]], 1), execution)
        actual = logits[b : b + 1, 8 - length :], work[:, b : b + 1, 8 - length :]
        assert_same(actual, (single.logits, single.trace.work), execution)


@each_case
def test_padding_takes_no_room_in_the_context(case):
    """A batch of short sequences may be padded beyond the context: only real tokens count."""
    model, ids = lively(case), tokens(1, 13, seed=8)
    padded, valid = left_padded(ids, (5,), TIME - 2, pad=0)
    logits, _ = decode(model, torch.cat([padded, ids[:, 5:]], 1), (TIME - 2, *[1] * 8), "hard", valid)
    assert_equal_to_rounding(logits[:, -13:], full(model, ids, "hard").logits)


# --- ragged lengths in cache slots ------------------------------------------------------------------------------------


def ragged(
    model: LanguageModel, ids: Tensor, chunks: list[Tensor], execution: str, kept: KVCache | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Logits and work of each sequence, decoded in chunks; each is a mask `[batch, time]` of the real columns."""
    kept = kept or new_cache(model, len(ids))
    taken = torch.zeros(len(ids), dtype=torch.long)
    logits, work = [[] for _ in ids], [[] for _ in ids]
    for valid in chunks:
        part = torch.full(valid.shape, 7)  # the token ids at padding do not matter
        for b, row in enumerate(valid):
            part[b, row] = ids[b, taken[b] : taken[b] + int(row.sum())]
        out = full(model, part, execution, cache=kept, valid=valid)
        assert out.logits.isfinite().all()
        for b, row in enumerate(valid):
            logits[b].append(out.logits[b, row])
            work[b].append(out.trace.work[:, b, row])
        taken += valid.sum(1)
    return [(torch.cat(a)[None], torch.cat(b, 1)[:, None]) for a, b in zip(logits, work, strict=True)]


def assert_each_is_as_if_alone(found: list, model: LanguageModel, ids: Tensor, execution: str) -> None:
    for b, (logits, work) in enumerate(found):
        if not logits.shape[1]:  # a sequence with nothing but padding
            continue
        single = full(model, ids[b : b + 1, : logits.shape[1]], execution)
        assert_same((logits, work), (single.logits, single.trace.work), execution)


@each_run
@given(data_=st.data())
@settings(max_examples=5)
def test_sequences_of_any_lengths_grow_side_by_side(case, execution, data_):
    """Padding anywhere in a chunk: left, right, in between, or everywhere."""
    model, ids = lively(case), tokens(3, seed=17)
    left = [TIME] * 3
    chunks = []
    for columns in data_.draw(st.lists(st.integers(1, TIME), min_size=1, max_size=4)):
        valid = torch.tensor([data_.draw(st.lists(st.booleans(), min_size=columns, max_size=columns)) for _ in left])
        for b, row in enumerate(valid):
            row &= row.cumsum(0) <= left[b]
            left[b] -= int(row.sum())
        chunks.append(valid)
    chunks.append(torch.ones(3, 1, dtype=torch.bool) & (torch.tensor(left) > 0)[:, None])
    assert_each_is_as_if_alone(ragged(model, ids, chunks, execution), model, ids, execution)


@each_run
def test_more_columns_than_the_context_and_padding_after_a_full_sequence(case, execution):
    model, ids = lively(case), tokens(2, seed=18)
    first = torch.ones(2, TIME + 2, dtype=torch.bool)
    first[0, :2] = first[1, 5:8] = first[1, -1] = False  # 16 and 14 tokens in 18 columns, with a context of 16
    rest = torch.tensor([[False, False, False], [True, False, True]])
    found = ragged(model, ids, [first, rest], execution)
    assert [logits.shape[1] for logits, _ in found] == [TIME, TIME]
    assert_each_is_as_if_alone(found, model, ids, execution)


@each_run
def test_a_slot_that_was_freed_is_as_new(case, execution):
    """Two sequences; one ends and a third takes its slot while the other continues."""
    model, ids = lively(case), tokens(3, seed=19)
    for fixed in (False, True):
        kept = KVCache(
            model.config, 2, TIME, layers=model.method.cache_layers, like=model.norm.weight.detach(), fixed=fixed
        )
        full(model, ids[:2, :9], execution, cache=kept)
        kept.free([0])
        other = full(model, ids[2:, :5], execution, cache=kept.of([0]))
        both = full(model, torch.stack([ids[2, 5:9], ids[1, 9:13]]), execution, cache=kept)
        new, old = full(model, ids[2:, :9], execution), full(model, ids[1:2, :13], execution)
        assert kept.lengths.tolist() == [9, 13]
        joined = torch.cat([other.logits, both.logits[:1]], 1), torch.cat([other.trace.work, both.trace.work[:, :1]], 2)
        assert_same(joined, (new.logits, new.trace.work), execution)
        actual = both.logits[1:], both.trace.work[:, 1:]
        assert_same(actual, (old.logits[:, 9:], old.trace.work[:, :, 9:]), execution)


# --- 3. sparse = hard -------------------------------------------------------------------------------------------------


@each_case
@each_active
@pytest.mark.parametrize("padding", [False, True], ids=["unpadded", "padded"])
def test_sparse_equals_hard_on_given_decisions(case, active, padding):
    model, ids = lively(case), tokens(5, 13, seed=9)
    valid = (torch.arange(13) >= torch.tensor([0, 3, 12, 1, 0])[:, None]) if padding else None
    decisions = given_decisions(model, ids, active)
    hard, sparse = (full(model, ids, e, decisions=decisions, valid=valid) for e in ("hard", "sparse"))
    real = torch.ones(5, 13, dtype=torch.bool) if valid is None else valid
    assert_equal_to_rounding(sparse.logits[real], hard.logits[real])
    assert torch.equal(sparse.trace.work, hard.trace.work)
    if decisions is not None:
        assert torch.equal(hard.trace.work[routed_sites(model)], (decisions & real).float())


@each_case
@each_active
@torch.no_grad()
def test_decisions_that_are_told_are_those_that_are_given(case, active):
    model, ids = lively(case), tokens(2, 13, seed=9)
    decisions = given_decisions(model, ids, active)
    how = {} if decisions is None else model.forcing(decisions)
    for execution in ("hard", "sparse"):
        given, told = (model(ids, execution=execution, **one) for one in ({"decisions": decisions}, how))
        assert torch.equal(told.trace.work, given.trace.work)
        assert torch.equal(told.logits, given.logits)


@each_way_to_decide
@torch.no_grad()
def test_given_decisions_leave_no_router_out(case):
    """torch.compile drops unused results; a model timed with given decisions would then not be the one served."""
    model, ids = lively(case), tokens(2, 13, seed=9)

    def operations(decisions: Tensor | None) -> int:
        def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
            output = model(ids, execution="hard", decisions=decisions)
            return output.logits, output.trace.work

        graph = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(ids).graph
        graph.eliminate_dead_code()
        return sum(str(node.target).startswith(("aten.mm", "aten.addmm", "aten._softmax")) for node in graph.nodes)

    assert operations(given_decisions(model, ids, "some")) == operations(None)


FREE = 30_000
"""Free decisions per case; more than a million over all cases."""


@each_case_slowly
def test_sparse_flips_a_free_decision_only_at_the_threshold(case):
    """The threshold is between the two logits of a flip; if those are within 1e-5 of each other, it is, too."""
    model, sites = lively(case), routed_sites(lively(case))
    flips = decisions = 0
    worst = 0.0
    for seed in range(math.ceil(FREE / (1024 * TIME * len(sites))) if model.method.routers() else 1):
        ids = tokens(1024, seed=100 + seed)
        with torch.no_grad():
            hard, hard_logits = with_router_logits(model, lambda ids=ids: model(ids, execution="hard"))
            sparse, sparse_logits = with_router_logits(model, lambda ids=ids: model(ids, execution="sparse"))
        if not model.method.routers():  # no scores are computed, so nothing is rounded
            assert torch.equal(hard.trace.work, sparse.trace.work)
            assert_equal_to_rounding(sparse.logits, hard.logits)
            continue
        # A flip changes the input of later routers in that sequence, so those are not checked.
        unflipped = torch.ones(len(ids), dtype=torch.bool)
        decided = np.array_split(sites, len(hard_logits))  # a router may decide for several sites at once
        for at, a, b in zip(decided, hard_logits, sparse_logits, strict=True):
            worst = max(worst, float((a - b)[unflipped].abs().max()))
            flipped = (hard.trace.work[at] != sparse.trace.work[at]) & unflipped[:, None]
            unflipped &= ~flipped.any(2).any(0)
            flips, decisions = flips + int(flipped.sum()), decisions + flipped.numel()
        assert_equal_to_rounding(sparse.logits[unflipped], hard.logits[unflipped])
    print(f"{case}: {flips} flips in {decisions:,} free decisions, router logits at most {worst:.1e} apart")
    assert decisions >= FREE or not model.method.routers()
    assert worst <= 1e-5


# --- 4. every parameter is trained ------------------------------------------------------------------------------------


@each_case
def test_every_parameter_receives_a_gradient(case):
    torch.manual_seed(0)  # dropout and jitter
    model, ids = build(run_config(case), SPELLINGS).train(), tokens(64, TIME + 1, seed=10)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    out = model(inputs, execution="soft", targets=targets)
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + sum(out.losses.values())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def training_loss(case: str) -> tuple[LanguageModel, Callable[[], Tensor]]:
    model, ids = build(run_config(case), SPELLINGS).train(), tokens(4, TIME + 1, seed=10)

    def loss() -> Tensor:
        out = model(ids[:, :-1], targets=ids[:, 1:])
        return F.cross_entropy(out.logits.flatten(0, 1).float(), ids[:, 1:].flatten()) + sum(out.losses.values())

    return model, loss


def seeded(loss: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(0)  # dropout and jitter
    return loss()


@each_case_at_length
def test_training_asks_nothing_of_the_device(case):
    """No host synchronisation: shapes never depend on values, as torch.compile and CUDA graphs need. Same result."""
    model, loss = training_loss(case)
    expected = gradients(model, loss)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False, capture_scalar_outputs=False):
        found = gradients(model, torch.compile(loss, backend="eager", fullgraph=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_equal_gradients(found, expected)


@each_case
def test_training_in_bfloat16(case):
    """As on a GPU: products in bfloat16, which rounds at 2^-9; sums and decisions in float32."""
    model, loss = training_loss(case)
    exact = seeded(loss)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = seeded(loss)
    rounded.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert float(rounded.detach()) == pytest.approx(float(exact.detach()), rel=0.02)


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_precision(case, dtype):
    """The whole model in this dtype, forward with and without a cache, and backward. bfloat16 is precise to 2^-8.

    Errors add up over about ten roundings per block, so that a few dozen of them are rounding and 1 is not.
    """
    model, ids = copy.deepcopy(lively(case)).to(dtype), tokens(3, 13, seed=20)
    decisions = given_decisions(model, ids, "some")
    allowed = 64 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-5
    for execution in EXECUTIONS if model.method.has_soft else EXECUTIONS[1:]:
        given = None if execution == "soft" else decisions
        exact, found = (full(m, ids, execution, decisions=given) for m in (lively(case), model))
        assert found.logits.dtype == dtype
        assert torch.equal(found.trace.work > 0.5, exact.trace.work > 0.5) or execution == "soft"
        assert relative_error(found.logits.double(), exact.logits.double()) <= allowed
        kept = KVCache(model.config, 3, TIME, layers=model.method.cache_layers, like=model.norm.weight.detach())
        assert full(model, ids, execution, cache=kept).logits.isfinite().all()
    model.train()
    seeded(lambda: loss_of(model, ids, ids)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == dtype, name
        assert parameter.grad.isfinite().all(), name


# --- training with padding, and in pieces -----------------------------------------------------------------------------


def loss_of(model: LanguageModel, inputs: Tensor, targets: Tensor, valid: Tensor | None = None) -> Tensor:
    out = model(inputs, targets=targets, valid=valid)
    return F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten()) + sum(out.losses.values())


def in_training(case: str) -> LanguageModel:
    """Without dropout and jitter: random numbers drawn for padding would shift those of later tokens."""
    method = replace(CASES[case], jitter=0.0) if hasattr(CASES[case], "jitter") else CASES[case]
    return build(RunConfig(model=replace(model_of(case), dropout=0.0), method=method), SPELLINGS).train()


def gradients(model: LanguageModel, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    seeded(loss).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((actual[name] - gradient).abs().max()) <= 1e-5 * largest, name


@each_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_training_with_padding_is_training_without(case, side):
    """Losses and every gradient; with random decisions, at least the token ids at padding must change nothing."""
    model, ids = in_training(case), tokens(1, 10, seed=21)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    room = (TIME - 9, 0) if side == "left" else (0, TIME - 9)
    valid = F.pad(torch.ones_like(inputs), room).bool()
    padded_targets = F.pad(targets, room, value=NO_LOSS)
    found = [
        gradients(model, lambda pad=pad: loss_of(model, F.pad(inputs, room, value=pad), padded_targets, valid))
        for pad in (0, 7)
    ]
    assert_equal_gradients(found[0], found[1])
    if getattr(model.method.config, "routing", "") != "random":
        assert_equal_gradients(found[0], gradients(model, lambda: loss_of(model, inputs, targets)))


@each_case
def test_a_padded_batch_trains_each_sequence_as_if_alone(case):
    """Except if a quantile is taken over the batch."""
    model, ids, lengths = in_training(case), tokens(3, seed=22), (TIME, 11, 4)
    padded, valid = left_padded(ids, lengths, TIME, pad=0)
    torch.manual_seed(0)
    batch = model(padded, targets=torch.where(valid, padded, NO_LOSS), valid=valid)
    assert all(loss.isfinite() for loss in batch.losses.values())
    if "quantile" in (model.method.batch_statistic or ""):
        return
    for b, length in enumerate(lengths):
        single = model(ids[b : b + 1, :length], targets=ids[b : b + 1, :length])
        actual = batch.logits[b, -length:].detach(), batch.trace.work[:, b, -length:]
        assert_same(actual, (single.logits[0].detach(), single.trace.work[:, 0]), "soft")


class OneOf(Ranks):
    """One of several ranks with equal batch sizes, alone in its process."""

    def total(self, number: int) -> int:
        return number * self.world

    def sum(self, value: Tensor) -> Tensor:
        return value


def gradient_of_cut(case: str, accumulate: int, world: int) -> Tensor:
    """The gradient of a global batch of 8 sequences, split into `accumulate` micro-batches on each of `world` ranks."""
    ids, total, model = tokens(8, TIME + 1, seed=23).numpy(), 0, in_training(case)
    for rank in range(world):
        config = TrainConfig(batch_size=8, accumulate=accumulate, dtype="float32", device="cpu")
        step = OptimiserStep(model, config, torch.device("cpu"), OneOf(rank, world))  # changes no weight here
        mine = np.array_split(ids, world)[rank]
        step.begin(mine[:, :-1], mine[:, 1:], step=0)
        total = total + step.gradient
    return total


@each_case
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut_or_the_method_says_so(case):
    whole, said = gradient_of_cut(case, 1, 1), lively(case).method.batch_statistic
    for accumulate, world in ((2, 1), (8, 1), (1, 2), (2, 4)):
        error = float((gradient_of_cut(case, accumulate, world) - whole).norm() / whole.norm())
        assert (error > 1e-5) == (said is not None), (accumulate, world, error)


# --- 5. the trace is correct ------------------------------------------------------------------------------------------


@each_run
def test_work_is_between_zero_and_one(case, execution):
    model, ids = lively(case), tokens(16, seed=11)
    trace = full(model, ids, execution).trace
    assert trace.work.shape == (len(trace.sites), *ids.shape)
    assert trace.execution == execution
    assert not trace.work.requires_grad
    assert 0 <= trace.work.min() <= trace.work.max() <= 1
    unrouted = [n for n, site in enumerate(trace.sites) if not site.routed]
    assert (trace.work[unrouted] == 1).all()
    if execution != "soft":
        assert set(trace.work.unique().tolist()) <= {0.0, 1.0}


def counted_and_told(model: LanguageModel, ids: Tensor, execution: str, **options) -> tuple[int, float]:
    outputs: list[Output] = []
    counted = count_flops(lambda: outputs.append(model(ids, execution=execution, **options)))
    return counted, outputs[0].trace.totals().flops


@each_cost
def test_the_flops_of_the_trace_are_those_dispatched(case, execution, active):
    model, ids = lively(case), tokens(3, 13, seed=12)
    counted, told = counted_and_told(model, ids, execution, decisions=given_decisions(model, ids, active))
    assert counted > 0
    assert told == counted


@each_cost
def test_the_flops_of_the_trace_are_those_dispatched_with_a_cache(case, execution, active):
    model, ids, kept = lively(case), tokens(3, 13, seed=13), new_cache(lively(case), 3)
    decisions = given_decisions(model, ids, active)
    for columns in (slice(0, 9), slice(9, 10), slice(10, 13)):  # prefill, decode one, a chunk
        part = None if decisions is None else decisions[..., columns]
        counted, told = counted_and_told(model, ids[:, columns], execution, decisions=part, cache=kept)
        assert told == counted


@each_run
def test_the_flops_of_the_trace_are_those_dispatched_with_padding(case, execution):
    """Padding is computed, so its FLOPs are executed; leaving it out would claim a saving that does not exist."""
    padded, valid = left_padded(tokens(3, seed=14), (13, 8, 2), 13, pad=0)
    counted, told = counted_and_told(lively(case), padded, execution, valid=valid)
    assert told == counted


@each_case_slowly
def test_sparse_dispatches_less_the_more_it_skips(case):
    model, ids = lively(case), tokens(2, 4, seed=15)
    sites = len(routed_sites(model))
    hard = count_flops(lambda: model(ids, execution="hard"))
    if not sites:
        assert count_flops(lambda: model(ids, execution="sparse")) == hard
        return
    order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(0)).view(ids.shape)
    counts = [
        count_flops(lambda k=k: model(ids, execution="sparse", decisions=(order < k).expand(sites, -1, -1)))
        for k in range(ids.numel() + 1)
    ]
    steps = {b - a for a, b in pairwise(counts)}
    packed = any(site.per_key for site in model.method.sites(keys=1))
    assert len(steps) == 1 or packed, "every further active token costs the same, unless others attend over it"
    assert min(steps) > 0
    assert counts[-1] == hard


def test_the_counter_counts_attention_by_hand():
    q, k = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 9, 7)
    mask = torch.ones(5, 9, dtype=torch.bool).tril()
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            masked = count_flops(lambda: F.scaled_dot_product_attention(q, k, k, mask))
            causal = count_flops(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
        # Scores and their product with the values: two products of 2 x 3 x 5 rows, 9 (or 5) keys and width 7.
        assert masked == 2 * (2 * 3 * 5 * 9 * 7) * 2
        assert causal == 2 * (2 * 3 * 5 * 5 * 7) * 2


def test_the_counter_counts_a_linear_layer_by_hand_and_refuses_what_it_cannot_count():
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    assert count_flops(lambda: F.linear(x, weight, bias)) == 2 * (2 * 3) * 4 * 5
    assert count_flops(lambda: F.gelu(x) + F.layer_norm(x, (4,))) == 0
    with pytest.raises(NotImplementedError, match="aten::mv has no FLOP formula"):
        count_flops(lambda: weight @ x[0, 0])


# --- 6. saved and loaded ----------------------------------------------------------------------------------------------


@each_case
def test_saved_and_loaded_it_computes_the_same(case, tmp_path):
    model, ids = lively(case), tokens(4, seed=16)
    run = Run.create(tmp_path / "run", run_config(case), resume=False)
    write_json(run.path / "tokenizer.json", {})
    run.finish({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    loaded = load_model(Run.open(run.path), torch.device("cpu"))
    assert not torch.equal(build(run_config(case)).eval()(ids).logits, full(model, ids, "soft").logits)
    for execution in EXECUTIONS:
        assert torch.equal(full(loaded, ids, execution).logits, full(model, ids, execution).logits)


# --- 7. seeds ---------------------------------------------------------------------------------------------------------


@each_case
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(case):
    first, again, other = (build(run_config(case, seed)).state_dict() for seed in (3, 3, 4))
    assert first.keys() == again.keys() == other.keys()
    for name in first:
        assert torch.equal(first[name], again[name]), name
        constant = first[name].unique().numel() == 1  # norms, and biases that start at one value
        assert constant or not torch.equal(first[name], other[name]), name


@each_case
def test_building_moves_no_random_number_generator(case):
    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    before = states()
    build(run_config(case, seed=5))
    assert all(torch.equal(a, b) for a, b in zip(before, states(), strict=True))


@each_case
def test_the_weights_do_not_depend_on_what_was_drawn_before(case):
    first = build(run_config(case)).state_dict()
    torch.rand(7)
    again = build(replace(run_config(case), recipe="another")).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


# --- 8. it learns -----------------------------------------------------------------------------------------------------


@each_case_at_length
def test_it_learns_far_more_than_the_frequencies_of_tokens(case, tmp_path):
    """In sparse execution: a model that knew only the frequencies of characters would have the unigram loss."""
    config = tiny(tmp_path, CASES[case], n_layer=model_of(case).n_layer, steps=80, batch_size=8)
    config = replace(config, model=replace(model_of(case), dropout=0.0, vocab_size=0))
    dataset = data.load(config.data)
    config = resolve(config, dataset)
    model = build(config, dataset.tokenizer.spellings()).train()
    step = OptimiserStep(model, config.train, torch.device("cpu"), Ranks())
    for number in range(config.train.steps):
        batch = dataset.train_batch(seed=0, step=number, batch_size=8, context=config.model.context)
        step(*batch, step=number, lr=learning_rate(number, config.train))
    calibrate(model, dataset)
    stream = list(batches(dataset, "val", config.model.context, torch.device("cpu")))
    targets = torch.cat([targets.flatten() for _, targets in stream])
    share = torch.bincount(targets).double() / len(targets)
    unigram = -float((share * share.log()).nan_to_num().sum())
    loss = measure(model, iter(stream), lambda ids: model(ids, execution="sparse")).loss
    assert loss < 0.6 * unigram
