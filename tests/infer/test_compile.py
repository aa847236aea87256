"""compiled: one graph for the whole skipping pass, the same result, and freed memory is kept."""

import resource
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tokendepth.config import BudgetConfig, DenseConfig, ModelConfig, RunConfig, SpanConfig, TrainConfig
from tokendepth.infer.compile import compiled
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.methods import build
from tokendepth.model import LanguageModel
from tokendepth.runs.machine import keep_freed_memory

MODEL = ModelConfig(d_model=16, n_layer=2, n_head=2, d_ff=16, context=8, dropout=0.0, vocab_size=7)

MODERN = replace(
    MODEL, norm="rms", positions="rotary", n_kv_head=1, attention_bias="qkv", qk_norm=True, ffn="swiglu",
    ffn_bias=False, tie_head=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        yield


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.xdist_group("compiler")  # which takes seconds to start
def test_skipping_is_one_graph_and_equals_hard():
    """With the Llama-style block; the classic one is compiled below."""
    model = build(RunConfig(model=MODERN, method=SpanConfig())).eval()
    fast = compiled(model)
    torch._dynamo.utils.counters.clear()
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(7, (3, 8), generator=dice)
    draws = torch.rand(1, 3, 8, generator=dice)
    draws[0, 0, 0] = 0.0
    for share in (0.5, 0.0, 1e-6, 1.0):  # some, none, one, all
        decisions = draws < share
        hard = model(ids, execution="hard", decisions=decisions)
        sparse = fast(ids, execution="sparse", decisions=decisions)
        torch.testing.assert_close(sparse.logits, hard.logits, rtol=1e-5, atol=1e-6)
        assert torch.equal(sparse.trace.work, hard.trace.work)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


IDS = torch.arange(24).view(3, 8) % 7


def check(model: LanguageModel, fast: LanguageModel) -> float:
    """Returns the active fraction."""
    expected, found = model(IDS, execution="sparse"), fast(IDS, execution="sparse")
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.trace.work, expected.trace.work)
    return float(found.trace.work[1:].mean())


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")  # which takes seconds to start
@torch.no_grad()
def test_a_budget_that_is_set_afterwards_is_seen():
    model = build(RunConfig(model=MODEL, method=BudgetConfig())).eval()
    fast = compiled(model)
    torch._dynamo.utils.counters.clear()
    for share in (0.3, 0.8):
        calibrate_on(model, IDS, share)
        assert round(check(model, fast), 1) == share
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")  # which takes seconds to start
@torch.no_grad()
def test_weights_that_change_afterwards_are_seen():
    """Weights are constants for the compiler with every method, so the one with the smallest graph suffices."""
    small = replace(MODEL, n_layer=1)
    one, other = (build(RunConfig(model=small, method=DenseConfig(), train=TrainConfig(seed=s))).eval() for s in (0, 1))
    fast = {model: compiled(model) for model in (one, other)}
    check(one, fast[one])
    check(other, fast[other])
    one.method.blocks[0].ffn.up.weight.mul_(2)
    check(one, fast[one])
    check(other, fast[other])
    with torch.enable_grad():
        one(IDS).logits.square().sum().backward()
    torch.optim.AdamW(one.parameters(), lr=0.1, fused=True).step()  # does not update the versions of tensors
    check(one, fast[one])


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")  # which takes seconds to start
@torch.no_grad()
def test_one_sequence_of_grouped_heads():
    """Attention is one opaque op for the compiler, so the strides of its result must be declared correctly."""
    model = build(RunConfig(model=replace(MODERN, n_head=4, n_kv_head=2), method=BudgetConfig())).eval()
    calibrate_on(model, IDS, 0.5)
    expected, found = model(IDS[:1], execution="sparse"), compiled(model)(IDS[:1], execution="sparse")
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)


def test_freed_memory_is_kept():
    """Reused pages cause no new page faults; 64 MiB are 16,384 pages."""
    keep_freed_memory()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert min(faults() for _ in range(3)) < 1000


@pytest.mark.parametrize("sequences", [1, 2])
@torch.no_grad()
def test_a_span_of_any_length_of_text_is_one_graph(sequences):
    """The length stays symbolic; if fixed, products for one sequence would use a slower library on a CPU."""
    shape = ModelConfig(d_model=32, n_layer=3, n_head=2, d_ff=64, context=32, vocab_size=11, positions="rotary")
    model = build(RunConfig(model=shape, method=SpanConfig(decide="dice", budget=0.5))).eval()
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(model, dynamic=True, backend="eager")
        for time in (32, 21, 9):
            ids = torch.arange(sequences * time).view(sequences, time) % 11
            found, expected = fast(ids, execution="sparse"), model(ids, execution="sparse")
            torch.testing.assert_close(found.logits, expected.logits)
    assert counters["stats"]["unique_graphs"] == 1
