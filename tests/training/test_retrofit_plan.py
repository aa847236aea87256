"""From a budget to blocks, shares of tokens and FLOPs; and one-line errors for what is impossible."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokendepth as td
from benchmarks.faults.stopped import stopped_run
from tests.tiny import one_line, tiny, write_corpus
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DenseConfig, ModelConfig, RunConfig, SpanConfig
from tokendepth.errors import UserError
from tokendepth.methods.budget import spread
from tokendepth.runs.run import Run
from tokendepth.training.loop import train
from tokendepth.training.retrofit_options import RetrofitOptions
from tokendepth.training.retrofit_plan import (
    _per_block,
    _span,
    block_flops,
    executed_share,
    in_words,
    plan,
    share_for,
    span_length,
)

pytestmark = pytest.mark.xdist_group("retrofit")
SMOLLM2 = ModelConfig(
    d_model=576, n_layer=30, n_head=9, n_kv_head=3, d_ff=1536, context=512, dropout=0.0, vocab_size=49152,
    norm="rms", positions="rotary", rope_base=100_000.0, ffn="swiglu", ffn_bias=False,
)  # fmt: skip
DENSE = RunConfig(model=SMOLLM2, method=DenseConfig())
SHALLOW = replace(DENSE, model=replace(SMOLLM2, n_layer=3))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("base")
    return train(tiny(folder, DenseConfig(), n_layer=4, steps=2), folder / "dense", show=False)


@settings(max_examples=10)
@given(budget=st.floats(0.5, 0.999), length=st.integers(2, 3))
def test_the_share_of_tokens_is_that_of_the_flops(budget, length):
    for method in (_span(0, length, 1.0), _per_block(1.0, "update")):
        config = replace(SHALLOW, method=method)
        share = share_for(config, budget)
        assert block_flops(config, share) == pytest.approx(budget * block_flops(SHALLOW))
        at = replace(config, method=replace(method, budget=min(max(share, 1e-6), 1.0)))
        if 0 < share < 1:
            assert executed_share(at, SHALLOW) == pytest.approx(budget)


def test_the_shares_of_the_first_numbers():
    """SmolLM2: 9 of 30 blocks taken by 49% of tokens are 0.857 of the block FLOPs; dropping 4 leaves 0.867."""
    nine = replace(DENSE, method=_span(10, 9, 0.49, bypass=False))
    assert executed_share(nine, DENSE) == pytest.approx(0.857, abs=0.002)
    assert span_length(DENSE, 0.86) == 6
    assert span_length(DENSE, 0.7) == 13
    dropped = replace(DENSE, model=replace(SMOLLM2, n_layer=26))
    assert executed_share(dropped, DENSE) == pytest.approx(0.867, abs=0.001)


@settings(max_examples=10)
@given(budget=st.floats(0.3, 1.0), blocks=st.integers(2, 6))
def test_a_length_that_is_not_named_serves_the_budget(budget, blocks):
    config = replace(DENSE, model=replace(SMOLLM2, n_layer=blocks))
    length = span_length(config, budget)
    assert 1 <= length <= blocks
    assert share_for(replace(config, method=_span(0, length, 1.0)), budget) > 0.2 or length == blocks


@given(shares=st.lists(st.floats(0.02, 0.99), min_size=1, max_size=12), budget=st.floats(0.2, 1.0))
def test_shares_are_spread_in_their_order(shares, budget):
    found = spread(shares, budget)
    assert sum(found) / len(found) == pytest.approx(budget, abs=1e-6)
    assert all(0 < share <= 1 for share in found)
    ordered = [share for _, share in sorted(zip(shares, found, strict=True))]
    assert all(a <= b + 1e-9 for a, b in pairwise(ordered))


def test_shares_of_blocks_are_kept_while_training_and_after_calibration(base):
    config = plan(base, RetrofitOptions(method="budget", budget=0.8))
    method = config.method
    assert isinstance(method, BudgetConfig)
    assert len(method.profile) == 3
    assert sum(method.profile) / 3 == pytest.approx(method.budget, abs=0.03)
    dice = plan(base, RetrofitOptions(method="budget", budget=0.8, router="dice")).method
    assert isinstance(dice, BudgetConfig)
    assert dice == _per_block(dice.budget, "dice")
    assert dice.budget > method.budget, "routers cost something"


@pytest.mark.parametrize(("router", "expected"), [("teacher", "teacher"), ("kl", "kl"), ("loss", "loss")])
def test_what_the_router_of_a_span_learns(base, router, expected):
    method = plan(base, RetrofitOptions(router=router, begin=1, length=2)).method
    assert isinstance(method, SpanConfig)
    assert (method.decide, method.gain, method.keys, method.carry) == ("gain", expected, "all", "none")
    assert method.ranges(4) == [range(1, 3)]


def test_a_linear_map_replaces_the_blocks_that_would_be_dropped(base):
    config = plan(base, RetrofitOptions(method="replace", budget=0.7))
    dropped = plan(base, RetrofitOptions(method="drop", budget=0.7)).retrofit
    assert isinstance(config.method, SpanConfig)
    assert dropped is not None
    assert (config.method.ranges(4), config.method.replaced) == ([dropped.dropped], True)
    model = config.model
    block = 1 / model.n_layer
    linear = 2 * model.d_model**2
    assert block_flops(config, 0.0) == pytest.approx((1 - block) * block_flops(base.config) + linear)
    assert "a linear map replaces blocks" in in_words(config, base.config)


def test_a_full_budget_is_every_token(base):
    method = plan(base, RetrofitOptions(budget=1.0, length=2)).method
    assert isinstance(method, SpanConfig)
    assert method.budget == 1


def test_the_command(base, tmp_path, capsys):
    out = tmp_path / "run"
    line = ["retrofit", str(base.path), "--budget", "0.8", "--length", "2", "--trains", "lora", "--out", str(out)]
    main([*line, "--train.steps", "2", "--train.device", "cpu"])
    assert capsys.readouterr().out == f"finished: {out}; evaluate it with: tokendepth evaluate {out} --curve\n"
    config = Run.open(out).config
    assert config.retrofit is not None
    assert (config.retrofit.trains, config.train.steps, config.train.lr) == ("lora", 2, 1e-4)
    assert Run.open(out).finished


def dense_of(text: str, folder, **changes) -> Run:
    corpus = write_corpus(folder, text)
    return train(tiny(folder, DenseConfig(), corpus=corpus, steps=1, **changes), folder / "run", show=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "--budget is 0; expected a number above 0 and up to 1"),
        ({"budget": 1.2}, "--budget is 1.2; expected a number above 0 and up to 1"),
        ({"budget": float("nan")}, "--budget is nan; expected"),
        ({"budget": 0.4, "length": 2}, "of the block FLOPs is spent also where no token takes the span; name a higher"),
        (
            {"budget": 0.1, "method": "budget"},
            "of the block FLOPs is spent also where no token takes the routed blocks",
        ),
        ({"length": 9}, "--length is 9; expected 1 to 4 of the model's 4 blocks"),
        ({"length": 0}, "--length is 0; expected 1 to 4"),
        ({"method": "drop", "drop": 0}, "--drop is 0; expected 1 to 3"),
        ({"length": 2, "begin": 3}, "--begin is 3; expected 0 to 2, since the span has 2 of 4 blocks"),
        ({"method": "drop", "drop": 4}, "--drop is 4; expected 1 to 3 of the model's 4 blocks"),
        ({"method": "spam"}, "--method is 'spam'; did you mean 'span'?"),
        ({"method": "dense", "length": 2}, "--length is an option of --method span, but the method is dense; drop it"),
        ({"method": "budget", "router": "kl"}, "--router is 'kl', but the method is budget; expected one of update"),
        ({"method": "drop", "router": "kl"}, "--router is 'kl', but the method is drop; it has no router; drop it"),
        ({"choose": "luck"}, "--choose is 'luck'; expected one of alike, loss"),
        ({"corpus": "text:nowhere.txt"}, "data.corpus is 'text:nowhere.txt': no such file"),
        ({"corpus": "shakespear"}, "data.corpus is 'shakespear': no such corpus; did you mean"),
        ({"context": 8}, "--context is 8, but"),
        ({"rank": 0}, "rank is 0; expected a number from 1"),
        ({"distill": -1}, "distill is -1"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(base, options, said, tmp_path):
    with pytest.raises(UserError) as error:
        td.retrofit(base, tmp_path / "run", show=False, **options)
    assert said in one_line(error.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_taken_is_refused_before_anything_is_measured(base, tmp_path, monkeypatch):
    monkeypatch.setattr("tokendepth.api._dense_run", lambda *_: pytest.fail("the base was read"))
    (tmp_path / "notes.txt").write_text("mine")
    for taken, said in ((base.path, "already holds a run; continue it with --resume"), (tmp_path, "holds notes.txt")):
        with pytest.raises(UserError) as error:
            td.retrofit(base, taken, budget=0.8, show=False)
        assert said in one_line(error.value)


def test_what_cannot_be_a_base(base, tmp_path):
    routed = train(tiny(tmp_path, BudgetConfig(), steps=1), tmp_path / "routed", show=False)
    stopped = stopped_run(tiny(tmp_path, DenseConfig(), steps=3), tmp_path / "stopped", 2)
    changed = dense_of("to be or not to be " * 99, tmp_path / "changed")
    write_corpus(tmp_path / "changed", "something else altogether" * 99)
    damaged = dense_of("to be or not to be " * 99, tmp_path / "damaged")
    (damaged.path / "model.safetensors").write_bytes(b"")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    for model, said in (
        (tmp_path / "nowhere", "no such run folder"),
        (tmp_path, "is not a tokendepth run: it has no config.json"),
        (routed, "is of method budget; expected a dense model, into which routers are put"),
        (stopped, "is not finished"),
        (damaged, "model.safetensors"),
        (changed, "the text has changed since; name a copy of it as --corpus text:PATH"),
    ):
        with pytest.raises(UserError) as error:
            td.retrofit(model, tmp_path / "out", show=False)
        assert said in one_line(error.value)
    assert base.finished
