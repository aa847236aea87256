"""Retrofit: equals the untouched model while gates are open, resumes exactly, and ends as an ordinary run."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tokendepth as td
from benchmarks.faults.stopped import stopped_run
from tests.tiny import TEXT, one_line, steady, tiny, write_corpus
from tokendepth import data
from tokendepth.config import (
    BudgetConfig,
    DenseConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    SpanConfig,
    from_dict,
    to_dict,
)
from tokendepth.errors import UserError
from tokendepth.measure.block_changes import loss_without
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.measure.evaluate import evaluate, load_model
from tokendepth.methods import build
from tokendepth.methods.base import divergence
from tokendepth.methods.span import Span
from tokendepth.model import LanguageModel
from tokendepth.report import build as build_report
from tokendepth.retrofit_config import RetrofitConfig
from tokendepth.runs.run import Run
from tokendepth.training.loop import train
from tokendepth.training.retrofit import LowRank, Teacher, merge, set_trained, take_weights
from tokendepth.training.retrofit_options import RetrofitOptions
from tokendepth.training.retrofit_plan import _per_block, _span, executed_share, in_words, plan

pytestmark = pytest.mark.xdist_group("retrofit")
SHAPE = ModelConfig(d_model=32, n_layer=5, n_head=4, d_ff=48, context=16, dropout=0.0, vocab_size=11)
MODERN = replace(
    SHAPE, norm="rms", positions="rotary", n_kv_head=2, ffn="swiglu", ffn_bias=False, qk_norm=True, tie_head=False
)
STEPS = {"train.steps": 6, "train.checkpoint_every": 3, "train.eval_every": 3, "train.log_every": 1,
         "train.lr": 1e-2, "train.device": "cpu", "train.dtype": "float32"}  # fmt: skip
CPU = torch.device("cpu")

each_shape = pytest.mark.parametrize("shape", [SHAPE, MODERN], ids=["classic", "modern"])
each_method = pytest.mark.parametrize(
    "method",
    [*(_span(1, 3, 0.5, router) for router in ("teacher", "loss", "straight", "dice")), _per_block(0.5, "update"),
     _per_block(0.5, "straight", "0.9,0.5,0.5,0.1"), _per_block(0.5, "dice")],
    ids=["span-teacher", "span-loss", "span-straight", "span-dice", "budget-update", "budget-straight", "budget-dice"],
)  # fmt: skip


def lively(shape: ModelConfig, method: MethodConfig, seed: int = 0) -> LanguageModel:
    model = build(RunConfig(model=shape, method=method)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.2 + (parameter.ndim == 1))
    return model


def tokens(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (batch, 16), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("base")
    return train(tiny(folder, DenseConfig(), n_layer=4, steps=30, batch_size=8), folder / "dense", show=False)


@pytest.fixture(scope="module")
def spanned(base, tmp_path_factory) -> Run:
    return td.retrofit(base, tmp_path_factory.mktemp("spanned") / "run", budget=0.8, changes=STEPS, show=False)


def planned(base: Run, changes: dict | None = None, **options) -> RunConfig:
    return plan(base, RetrofitOptions(**{"budget": 0.8, **options}), STEPS | (changes or {}))


# --- the untouched model ----------------------------------------------------------------------------------------------


@each_shape
@each_method
@torch.no_grad()
def test_open_gates_leave_the_untouched_model_to_the_bit(shape, method):
    dense, ids = lively(shape, DenseConfig()), tokens()
    model = build(RunConfig(model=shape, method=method)).eval()
    assert not torch.equal(model(ids).logits, dense(ids).logits)
    take_weights(model, dense)
    expected, sites = dense(ids).logits, sum(site.routed for site in model.method.sites(1))
    opened = {"decisions": torch.ones(sites, *ids.shape, dtype=torch.bool)}
    assert torch.equal(model(ids, execution="hard", **opened).logits, expected)
    if model.method.dial(shape, method) is not None:  # a span with random decisions has no dial
        calibrate_on(model, ids[:1], 1.0)
        out = model(ids, execution="hard")
        assert torch.equal(out.logits, expected), "also on text that the thresholds were not found on"
        assert out.trace.totals().active_fraction == 1
        torch.testing.assert_close(model(ids, execution="sparse").logits, expected, rtol=1e-5, atol=1e-5)


@each_shape
@torch.no_grad()
def test_dropped_blocks_are_left_out(shape):
    dense, ids = lively(shape, DenseConfig()), tokens()
    dropped = build(RunConfig(model=replace(shape, n_layer=3), method=DenseConfig())).eval()
    take_weights(dropped, dense, range(2, 4))
    own = F.cross_entropy(dropped(ids).logits.flatten(0, 1), ids.flatten()).item()
    assert own == pytest.approx(loss_without(dense, (ids, ids), range(2, 4)), rel=1e-6)
    assert own != pytest.approx(loss_without(dense, (ids, ids), range(1, 3)), rel=1e-3)


def test_a_base_that_does_not_fit_is_refused():
    dense = lively(SHAPE, DenseConfig())
    with pytest.raises(UserError, match="does not fit this model at"):
        take_weights(lively(replace(SHAPE, d_ff=64), DenseConfig()), dense)


# --- trained parameters -----------------------------------------------------------------------------------------------


def trained_names(model: LanguageModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def started(trains: str, method: MethodConfig | None = None) -> LanguageModel:
    model = lively(SHAPE, method or _span(1, 3, 0.5))
    set_trained(model, RetrofitConfig("base", "0" * 64, trains=trains, rank=2), seed=0)  # pyright: ignore[reportArgumentType]
    return model


def test_what_is_frozen():
    assert trained_names(started("all")) == set(dict(started("all").named_parameters()))
    routers = trained_names(started("routers"))
    assert routers == {"method.bypass.map.weight"} | {f"method.decider.router.{name}" for name in
                       ("hidden.weight", "hidden.bias", "logit.weight", "logit.bias")}  # fmt: skip
    low_rank = trained_names(started("lora"))
    assert routers < low_rank
    assert len(low_rank - routers) == 5 * 4 * 2, "two factors for each of four matrices of five blocks"
    assert all(".parametrizations.weight.0." in name for name in low_rank - routers)


@torch.no_grad()
def test_low_rank_changes_begin_with_none_and_end_in_the_weights():
    before, model, ids = lively(SHAPE, _span(1, 3, 0.5)), started("lora"), tokens()
    assert torch.equal(model(ids).logits, before(ids).logits)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.b.normal_(generator=torch.Generator().manual_seed(1))
            assert module.b.shape[1] == module.a.shape[0] == 2
    changed = model(ids).logits
    assert not torch.allclose(changed, before(ids).logits)
    merge(model)
    assert torch.equal(model(ids).logits, changed)
    assert model.state_dict().keys() == before.state_dict().keys(), "an ordinary model"
    difference = model.method.blocks[0].ffn.up.weight - before.method.blocks[0].ffn.up.weight  # pyright: ignore
    assert torch.linalg.matrix_rank(difference, tol=1e-4) == 2


def test_nothing_to_train_is_one_line():
    with pytest.raises(UserError) as error:
        started("routers", _span(1, 3, 0.5, "dice", bypass=False))
    assert "nothing would be trained" in one_line(error.value)


def test_the_teachers_part_of_the_loss_by_hand():
    dense, ids = lively(SHAPE, DenseConfig()), tokens()
    teacher, logits = Teacher(dense, 0.25), lively(SHAPE, DenseConfig(), seed=1)(ids).logits
    told = teacher(ids)
    assert not told.requires_grad
    counted = torch.zeros_like(ids, dtype=torch.bool)
    counted[0, :3] = True
    p, q = (torch.softmax(x[0, :3], -1) for x in (told, logits))
    by_hand = (p * (p / q).log()).sum()
    found = teacher.blend(torch.tensor(8.0), told, logits, counted, torch.tensor(0.5))
    assert found.item() == pytest.approx(0.75 * 8 + 0.25 * 0.5 * by_hand.item(), rel=1e-5)
    assert Teacher(dense, 0.0).blend(torch.tensor(8.0), told, logits, counted, torch.tensor(0.5)) == 8


# --- targets of the router --------------------------------------------------------------------------------------------


def test_the_gain_is_the_divergence_of_the_model_without_the_span_from_the_teacher():
    dense, ids = lively(SHAPE, DenseConfig()), tokens()
    model = build(RunConfig(model=SHAPE, method=_span(1, 3, 0.5, bypass=False))).train()
    take_weights(model, dense)
    without = build(RunConfig(model=replace(SHAPE, n_layer=2), method=DenseConfig())).eval()
    take_weights(without, dense, range(1, 4))
    other = lively(SHAPE, DenseConfig(), seed=3)(ids).logits.detach()
    with torch.no_grad():
        skipped = without(ids).logits
        (entering, ctx), method = model.entering(ids, "hard"), model.method
        assert isinstance(method, Span)
        score = method.decider(method.seen(method.blocks[0](entering, ctx), method._blocks_of_span(method)), ctx)
    for teacher in (other, None):
        told = other if teacher is not None else dense(ids).logits.detach()
        target = torch.log1p(10 * divergence(told, skipped))
        found = model(ids, targets=ids, teacher=teacher).losses["gain"].item()
        assert found == pytest.approx((score - target).square().mean().item(), rel=1e-4)


def test_the_router_of_a_block_is_told_how_much_the_block_changes_a_token():
    dense, ids = lively(SHAPE, DenseConfig()), tokens()
    model = build(RunConfig(model=SHAPE, method=replace(_per_block(1.0, "update"), anneal=0.0))).train()
    take_weights(model, dense)
    loss = model(ids).losses["update"]
    states = []
    for block in dense.method.blocks:  # pyright: ignore
        block.register_forward_hook(lambda _, args, out: states.append((args[0], out)))
    dense(ids)
    errors = []
    for (before, after), block in zip(states[1:], model.method.blocks[1:], strict=True):  # pyright: ignore
        target = torch.log1p(10 * (after - before).norm(dim=-1) / before.norm(dim=-1))
        errors.append((-block.halt(before) - target).square().mean())
    assert len(errors) == 4
    assert loss.item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-4)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for name, gradient in zip(dict(model.named_parameters()), gradients, strict=True):
        assert (gradient is not None) == ("router" in name)


@each_method
def test_the_share_falls_over_the_first_part_of_training(method):
    model, ids = lively(SHAPE, method).train(), tokens(16)

    def share() -> float:
        return model(ids).trace.totals().active_fraction

    scatter = 0.1 if "dice" in str(method) or "random" in str(method) else 0.02
    for done, wanted in ((0.0, 1.0), (0.5, 0.75), (1.0, 0.5), (1.8, 0.5)):
        model.method.set_progress(done * method.anneal)
        assert share() == pytest.approx(wanted, abs=scatter if done else 1e-6)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_retrofit_is_a_run_like_any_other(spanned, base, tmp_path):
    method = spanned.config.method
    assert isinstance(method, SpanConfig)
    assert method == _span(method.begin, 2, method.budget), "half of four blocks"
    rows = spanned.metrics()
    untouched = evaluate(base, timing=False)["sparse"]["loss"]
    assert (rows[0]["step"], rows[0]["val_active_fraction"]) == (0, 1.0)
    assert rows[0]["val_loss"] == pytest.approx(untouched, rel=1e-6), "the untouched model on the same text"
    assert rows[1]["active_fraction"] == 1
    assert rows[-2]["active_fraction"] == pytest.approx(method.budget, abs=0.05)
    figures = td.evaluate(spanned, timing=False, curve=True)
    assert figures["untouched"]["loss"] == pytest.approx(untouched, rel=1e-6)
    assert figures["block_flops"] == pytest.approx(0.8, abs=0.03)
    at = replace(spanned.config, method=replace(method, budget=figures["sparse"]["active_fraction"]))
    assert figures["block_flops"] == pytest.approx(executed_share(at, base.config), rel=0.02)
    full = figures["curve"][-1]
    assert (full["budget"], full["sparse"]["active_fraction"]) == (1.0, 1.0)
    page = build_report([spanned], tmp_path / "report")
    sparse, share = figures["sparse"]["loss"], figures["block_flops"]
    told = f"loss {untouched:.4f} before the retrofit, {sparse:.4f} at {share:.3f} of its block FLOPs"
    assert told in page.read_text()
    assert len(td.generate(spanned, "green", tokens=3, device="cpu").text) == 3
    assert td.load(spanned, device="cpu", budget=0.2)("green bottles").trace.totals().active_fraction < 1


def test_an_evaluation_does_without_the_base(spanned, tmp_path):
    copy = Run(Path(shutil.copytree(spanned.path, tmp_path / "copy")))
    moved = Path(spanned.config.retrofit.base)  # pyright: ignore[reportOptionalMemberAccess]
    moved.rename(moved.with_name("elsewhere"))
    try:
        assert "untouched" not in evaluate(copy, timing=False)
        assert train(copy.config, copy.path, resume=True, show=False) == copy, "nor does a finished run need it"
    finally:
        moved.with_name("elsewhere").rename(moved)


@pytest.mark.parametrize(
    "options",
    [
        {"trains": "all"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({"trains": "lora"}, {"trains": "routers"}, {"method": "budget", "trains": "lora"})
        ),
    ],
    ids=["all", "lora", "routers", "budget-lora"],
)
def test_stopped_and_resumed_it_ends_in_the_same_weights(base, options, tmp_path):
    whole = td.retrofit(base, tmp_path / "whole", budget=0.8, changes=STEPS, show=False, **options)
    stopped_run(whole.config, tmp_path / "stopped", 4)
    checkpoint, _ = Run(tmp_path / "stopped").load_checkpoint()
    assert checkpoint is not None
    kept = {name.removeprefix("model.") for name in checkpoint.tensors if name.startswith("model.")}
    assert ("embedding.weight" in kept) == (options["trains"] == "all"), "a checkpoint holds what is trained"
    resumed = td.retrofit(base, tmp_path / "stopped", budget=0.8, changes=STEPS, resume=True, show=False, **options)
    assert steady(resumed.metrics()) == steady(whole.metrics())
    before, weights = base.weights(), whole.weights()
    for name, array in resumed.weights().items():
        assert np.array_equal(array, weights[name]), name
    same = {name: np.array_equal(before[name], weights[name]) for name in before}
    assert not any(".parametrizations." in name for name in weights)
    if options["trains"] == "routers":
        assert all(same.values()), "a frozen base"
    else:
        assert not same["method.blocks.1.ffn.up.weight"]
        assert same["embedding.weight"] == (options["trains"] == "lora")


@pytest.mark.parametrize("method", ["span", "dense"])
def test_routers_move_before_the_weights_where_there_are_any(base, method, tmp_path):
    config = planned(base, method=method)
    assert config.retrofit is not None
    config = replace(config, retrofit=replace(config.retrofit, routers_first=0.5))
    checkpoint, _ = stopped_run(config, tmp_path / "run", 4).load_checkpoint()
    assert checkpoint is not None
    before, halfway = base.weights(), {name: checkpoint.tensors[f"model.{name}"] for name in base.weights()}
    assert all(np.array_equal(before[name], halfway[name]) for name in before) == (method == "span")
    after = train(config, tmp_path / "run", resume=True, show=False).weights()
    assert not np.array_equal(before["method.blocks.1.ffn.up.weight"], after["method.blocks.1.ffn.up.weight"])
    if method == "span":
        routers = [name for name in after if name not in before and f"model.{name}" in checkpoint.tensors]
        fresh = build(config).state_dict()
        assert routers
        assert not any(np.array_equal(fresh[name].numpy(), checkpoint.tensors[f"model.{name}"]) for name in routers)


def test_what_was_measured_is_not_measured_again(base, tmp_path, monkeypatch):
    config = planned(base)
    stopped_run(config, tmp_path / "run", 2)
    monkeypatch.setattr("tokendepth.training.retrofit_plan.choose_span", None)
    resumed = td.retrofit(base, tmp_path / "run", budget=0.8, changes=STEPS, resume=True, show=False)
    assert resumed.config == config
    with pytest.raises(UserError, match="holds another run: its method"):
        td.retrofit(base, tmp_path / "run", budget=0.7, changes=STEPS, length=2, resume=True, show=False)
    with pytest.raises(UserError, match="resume it with the --budget and --length it began with"):
        td.retrofit(base, tmp_path / "run", budget=0.7, changes=STEPS, length=3, resume=True, show=False)


def test_a_base_that_is_gone_or_another(base, tmp_path):
    copy = Run(Path(shutil.copytree(base.path, tmp_path / "copy")))
    config = planned(copy)
    stopped_run(config, tmp_path / "run", 2)
    shutil.rmtree(copy.path)
    with pytest.raises(UserError) as error:
        train(config, tmp_path / "run", resume=True, show=False)
    assert "the base of this retrofit cannot be used: " in one_line(error.value)
    other = tiny(tmp_path, DenseConfig(), n_layer=4, steps=1, corpus=base.config.data.corpus)
    train(other, copy.path, show=False)
    with pytest.raises(UserError) as error:
        train(config, tmp_path / "run", resume=True, show=False)
    assert "holds other weights than this retrofit began with" in one_line(error.value)


@pytest.mark.parametrize("method", ["dense", "drop"])
def test_the_controls_are_dense_runs_trained_on_the_same_tokens(base, method, spanned, tmp_path):
    run = td.retrofit(base, tmp_path / "run", budget=0.7, method=method, changes=STEPS, show=False)
    assert run.config.method == DenseConfig()
    assert run.config.model.n_layer == (4 if method == "dense" else 3)
    assert run.config.train == spanned.config.train
    assert run.config.data == spanned.config.data
    assert load_model(run, CPU)(tokens() % 5).trace.totals().active_fraction == 1
    again = td.retrofit(run, tmp_path / "again", budget=0.85, changes={**STEPS, "train.steps": 1}, show=False)
    assert again.finished, "a retrofit that is dense can be retrofitted"


def test_other_text_in_the_bases_tokens(base, tmp_path):
    words = "".join(sorted(set(TEXT))) + "the wall fell on bottles; " * 60
    run = td.retrofit(base, tmp_path / "run", corpus=write_corpus(tmp_path, words), changes=STEPS, show=False)
    assert run.config.data.tokens == f"tokenizer:{base.path / 'tokenizer.json'}"
    assert run.tokenizer == base.tokenizer
    with pytest.raises(UserError) as error:
        td.retrofit(base, tmp_path / "other", corpus=write_corpus(tmp_path / "o", "Ω and so on" * 99), show=False)
    assert "has the character 'Ω', which is none of the run's" in one_line(error.value)


def test_in_words(base):
    said = in_words(planned(base, length=2, begin=1), base.config)
    share = planned(base, length=2, begin=1).method.budget  # pyright: ignore[reportAttributeAccessIssue]
    assert said == f"blocks 1 to 2 of 4 are taken by {share:.3f} of the tokens: 0.800 of the block FLOPs"
    assert in_words(planned(base, method="drop", drop=2), base.config).endswith("are dropped: 0.500 of the block FLOPs")
    assert (
        in_words(planned(base, method="dense"), base.config)
        == "every token takes all 4 blocks: 1.000 of the block FLOPs"
    )


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_taught_to_draft_for_itself(base, tmp_path):
    """Its predictions with the whole span skipped become more similar to those with nothing skipped."""
    ids, distances = torch.from_numpy(data_of(base)), []
    for draft in (0.0, 1.0):
        options = {"budget": 1.0, "begin": 1, "length": 2, "draft": draft, "changes": {**STEPS, "train.steps": 24}}
        run = td.retrofit(base, tmp_path / f"{draft}", show=False, **options)
        model = load_model(run, CPU)
        with torch.no_grad():
            full, skipping = (
                model(ids, execution="hard", decisions=torch.full((2, *ids.shape), on)).logits for on in (True, False)
            )
        distances.append(divergence(full, skipping).mean().item())
    assert distances[1] < 0.7 * distances[0]


def data_of(base: Run) -> np.ndarray:
    """Part of the run's validation text."""
    dataset = data.load(base.config.data)
    return dataset.train_batch(seed=1, step=0, batch_size=8, context=16)[0]


def test_what_draft_means_for_each_method(base):
    span = planned(base, draft=1.0, budget=1.0, begin=1, length=2).method
    assert isinstance(span, SpanConfig)
    assert (span.draft, span.budget) == (1.0, 1.0)
    blocks = planned(base, draft=0.5, method="budget").method
    assert isinstance(blocks, BudgetConfig)
    assert (blocks.dial, blocks.distill, blocks.shares, blocks.learn) == (True, 0.5, "", "update")
    with pytest.raises(UserError) as error:
        planned(base, draft=1.0, method="drop")
    assert "--draft is 1, but the method is drop, which skips nothing; drop it" in one_line(error.value)


# --- configs ----------------------------------------------------------------------------------------------------------


def test_the_config_says_what_it_starts_from(spanned):
    tree = to_dict(spanned.config)
    assert from_dict(tree) == spanned.config
    assert "retrofit" not in to_dict(replace(spanned.config, retrofit=None)), "of other runs nothing is said"
    for key, value, said in (
        ("ranks", 1, "retrofit.ranks: unknown key; did you mean 'rank'?"),
        ("sha256", "xyz", "retrofit.sha256 is 'xyz'; expected 64 hexadecimal digits"),
        ("base", "", "retrofit.base is ''; expected the folder of a finished dense run"),
        ("trains", "some", "retrofit.trains is 'some'; expected one of all, lora, routers"),
        ("distill", 1.5, "retrofit.distill is 1.5; expected a number from 0 to 1"),
    ):
        with pytest.raises(UserError) as error:
            from_dict({**tree, "retrofit": {**tree["retrofit"], key: value}})
        assert said in one_line(error.value)
