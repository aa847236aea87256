"""An optimiser step matches the textbook, however its batch is split, and is not taken if anything is not finite."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny import one_line, tiny
from tokendepth.config import DenseConfig, RunConfig, TrainConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.methods import build
from tokendepth.model import LanguageModel
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep, learning_rate

VOCABULARY = 23
DEPTH_PENALTY = 0.1
METHODS = {"dense": DenseConfig(), "tsa": TSAConfig(depth_penalty=DEPTH_PENALTY)}
NO_CLIP = 1e9
# Sums of the same float32 terms in another order; measured: one unit in the last place.
ROUNDING = 8 * torch.finfo(torch.float32).eps
CPU = torch.device("cpu")


def config(method: str = "tsa", **changes) -> RunConfig:
    # The corpus is not read here.
    return tiny(Path(), METHODS[method], corpus="stdlib", vocab_size=VOCABULARY, **{"clip": NO_CLIP, **changes})


def optimiser(run: RunConfig) -> OptimiserStep:
    return OptimiserStep(build(run).train(), run.train, CPU, Ranks())


def batch(seed: int = 0, *, masked: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets; if masked, rows have different numbers of targets, and one has none."""
    random = np.random.default_rng(seed)
    inputs, targets = (random.integers(0, VOCABULARY, (4, 16)) for _ in range(2))
    if masked:
        for row, targets_left in enumerate((16, 3, 0, 9)):
            targets[row, : 16 - targets_left] = -100
    return inputs, targets


def plain_loss(model: LanguageModel, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
    """Task and depth loss as in a textbook: the mean over all targets, and the penalty on the mean gate."""
    out = model(torch.from_numpy(inputs))
    task = F.cross_entropy(out.logits.flatten(0, 1), torch.from_numpy(targets).flatten(), ignore_index=-100)
    return task, out.losses.get("depth", torch.zeros(()))


def plain_gradient(model: LanguageModel, inputs: np.ndarray, targets: np.ndarray) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    sum(plain_loss(model, inputs, targets)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients(step: OptimiserStep) -> dict[str, Tensor]:
    return dict(zip(step.parameters, step.gradients, strict=True))


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], part: str = "") -> float:
    """The relative error of all gradients whose names contain `part`, as one vector."""
    names = [name for name in expected if part in name]
    assert names
    difference = torch.cat([(found[name].double() - expected[name].double()).flatten() for name in names])
    return float(difference.norm() / torch.cat([expected[name].double().flatten() for name in names]).norm())


def snapshot(step: OptimiserStep) -> dict[str, np.ndarray]:
    """A copy of the state, whose weights on a CPU are the model's own memory."""
    return {name: array.copy() for name, array in step.state().items()}


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


# --- weight decay -----------------------------------------------------------------------------------------------------


def is_decayed(name: str) -> bool:
    """As in the TSA paper's appendix: matrices of linear layers are decayed; biases, norms and embeddings are not."""
    matrices = ("qkv.weight", "out.weight", "up.weight", "down.weight", "router.hidden.weight", "router.logit.weight")
    return name.endswith(matrices)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_matrices_of_linear_layers_decay(method):
    """With a zero gradient, AdamW only decays."""
    step = optimiser(config(method, weight_decay=0.5))
    with torch.no_grad():
        for parameter in step.parameters.values():
            parameter.add_(1.0)  # biases start at zero, where decay would not be visible
    before = {name: p.detach().clone() for name, p in step.parameters.items()}
    step.sums.zero_()
    for group in step.adam.param_groups:
        group["lr"] = 0.01
    step.adam.step()
    after = {name: p.detach() for name, p in step.model.named_parameters()}
    assert sum(map(is_decayed, after)) == (12 if method == "dense" else 16)
    for name, value in after.items():
        if is_decayed(name):
            torch.testing.assert_close(value, before[name] * (1 - 0.01 * 0.5), rtol=1e-6, atol=0)
        else:
            assert torch.equal(value, before[name]), name


def test_every_parameter_is_in_exactly_one_group():
    step = optimiser(config())
    decayed, others = (group["params"][0].numel() for group in step.adam.param_groups)
    sizes = {name: -(-p.numel() // 64) * 64 for name, p in step.model.named_parameters()}  # aligned
    assert decayed == sum(size for name, size in sizes.items() if is_decayed(name))
    assert decayed + others == sum(sizes.values())


def test_uniform_decay_leaves_nothing_out():
    """MLX's reading of the TSA paper: biases, norms and embeddings decay, too; its state survives a checkpoint."""
    run = config(weight_decay=0.5, decay="all")
    step = optimiser(run)
    with torch.no_grad():
        for parameter in step.parameters.values():
            parameter.add_(1.0)
    before = {name: parameter.detach().clone() for name, parameter in step.parameters.items()}
    step.gradient.zero_()
    step.adam.param_groups[0]["lr"] = 0.1
    step.adam.step()
    for name, parameter in step.parameters.items():
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * 0.5))
    other = optimiser(run)
    other.load_state(step.state(), step=1)
    for name, parameter in other.parameters.items():
        assert torch.equal(parameter, step.parameters[name]), name


def test_flattening_changes_no_weight():
    run = config()
    before, step = build(run).state_dict(), optimiser(run)
    after = step.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- the learning rate ------------------------------------------------------------------------------------------------


def test_the_cosine_runs_from_the_peak_to_a_tenth():
    train = TrainConfig(steps=100, lr=3e-4)
    assert learning_rate(0, train) == 3e-4
    assert learning_rate(50, train) == pytest.approx(3e-4 * 0.55, rel=1e-12)
    assert learning_rate(100, train) == pytest.approx(3e-5, rel=1e-12)
    rates = [learning_rate(step, train) for step in range(101)]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 101


def test_a_warm_up_rises_in_equal_steps_to_the_peak_and_the_cosine_takes_the_rest():
    train = TrainConfig(steps=104, lr=1.0, warmup=4)
    rates = [learning_rate(step, train) for step in range(105)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], rel=1e-12)
    assert rates[4:] == [learning_rate(step, TrainConfig(steps=100, lr=1.0)) for step in range(101)]


def test_the_learning_rate_given_is_the_one_applied():
    step = optimiser(config(weight_decay=0.0))
    before = snapshot(step)
    step(*batch(), step=0, lr=0.0)
    after = snapshot(step)
    assert same_bits(*({k: v for k, v in s.items() if k.startswith("model.")} for s in (before, after)))
    step(*batch(), step=1, lr=0.01)
    moved = [np.abs(step.state()[name] - before[name]).max() for name in before if name.startswith("model.")]
    # At first, Adam moves a weight by about the learning rate.
    assert 0.005 < max(moved) < 0.02


# --- the gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradient_are_those_of_plain_autograd_however_the_batch_is_cut(method, accumulate, masked):
    step = optimiser(config(method, accumulate=accumulate))
    inputs, targets = batch(masked=masked)
    task, depth = (loss.item() for loss in plain_loss(step.model, inputs, targets))
    expected = plain_gradient(step.model, inputs, targets)
    stats = step(inputs, targets, step=0, lr=0.0)
    assert stats.task == pytest.approx(task, rel=ROUNDING)
    assert stats.depth == pytest.approx(depth, rel=ROUNDING)
    assert (stats.depth > 0) == (method == "tsa")
    assert distance(gradients(step), expected) < ROUNDING
    norm = torch.cat([g.flatten().double() for g in expected.values()]).norm().item()
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)  # the root of a float32 sum of 30,000 squares


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_depth_penalty_reaches_the_routers_whatever_the_accumulation(accumulate):
    """RELIABILITY 18. The penalty's part of the routers' gradient is also compared separately."""
    paid, free = (
        tiny(Path(), TSAConfig(depth_penalty=price), corpus="stdlib", vocab_size=VOCABULARY, clip=NO_CLIP)
        for price in (DEPTH_PENALTY, 0.0)
    )
    inputs, targets = batch()
    model = build(paid).train()
    plain_loss(model, inputs, targets)[1].backward()
    expected = {name: p.grad for name, p in model.named_parameters() if "router" in name}
    assert len(expected) == 8
    found = []
    for run in (paid, free):
        step = optimiser(replace(run, train=replace(run.train, accumulate=accumulate)))
        step(inputs, targets, step=0, lr=0.0)
        found.append({name: gradient.clone() for name, gradient in gradients(step).items() if "router" in name})
    whole, of_task = found
    assert distance(whole, plain_gradient(build(paid).train(), inputs, targets), "router") < ROUNDING
    assert distance({name: whole[name] - of_task[name] for name in whole}, expected) < ROUNDING


def test_work_is_summed_over_the_whole_batch():
    for accumulate in (1, 2, 4):
        dense, tsa = (optimiser(config(method, accumulate=accumulate)) for method in METHODS)
        assert dense(*batch(), step=0, lr=0.0).work == (64.0, 64.0, 64.0)
        inputs, targets = batch()
        expected = tsa.model(torch.from_numpy(inputs)).trace.work.double().sum((1, 2)).tolist()
        assert tsa(inputs, targets, step=0, lr=0.0).work == pytest.approx(expected, rel=ROUNDING)
        assert expected[0] == 64.0
        assert all(0 < work < 64 for work in expected[1:])


def test_a_large_gradient_is_clipped_to_the_norm_and_reported_as_it_was():
    free, clipped = (optimiser(config(clip=clip)) for clip in (NO_CLIP, 0.25))
    norms = [step(*batch(), step=0, lr=0.0).grad_norm for step in (free, clipped)]
    assert norms[0] == norms[1] > 0.25
    assert clipped.gradient.norm().item() == pytest.approx(0.25, rel=ROUNDING)
    torch.testing.assert_close(clipped.gradient, free.gradient * (0.25 / norms[0]))


def test_a_small_gradient_is_left_alone():
    free = optimiser(config())
    norm = free(*batch(), step=0, lr=0.0).grad_norm
    barely = optimiser(config(clip=norm * 1.001))
    barely(*batch(), step=0, lr=0.0)
    assert torch.equal(free.gradient, barely.gradient)


@pytest.mark.parametrize("method", METHODS)
def test_steps_equal_those_of_torchs_adamw_on_the_papers_groups(method):
    run = config(method, clip=0.5, weight_decay=0.1)
    step = optimiser(run)
    model = build(run).train()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if is_decayed(name)], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if not is_decayed(name)], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for number in range(3):
        lr = learning_rate(number, TrainConfig(steps=3, lr=1e-2))
        for group in adam.param_groups:
            group["lr"] = lr
        adam.zero_grad()
        sum(plain_loss(model, *batch(number))).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        adam.step()
        step(*batch(number), step=number, lr=lr)
        if number == 0:
            apart = {name: float((p - named[name]).detach().abs().max()) for name, p in step.parameters.items()}
            assert max(apart.values()) <= 1e-6, apart
    # Adam's division by small moments amplifies rounding; a thousandth of the learning rate is still only rounding.
    apart = {name: float((p - named[name]).detach().abs().max()) for name, p in step.parameters.items()}
    assert max(apart.values()) <= 1e-3 * 1e-2, apart


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_seed_and_step_alone():
    def loss(step: int, seed: int = 0) -> float:
        run = config(dropout=0.5, seed=seed)
        made = OptimiserStep(build(config(dropout=0.5)).train(), run.train, CPU, Ranks())
        return made(*batch(), step=step, lr=0.0).task

    first = loss(0)
    torch.rand(7)  # regardless of other draws from the generator
    assert loss(0) == first
    assert len({loss(0), loss(1), loss(0, seed=1)}) == 3


# --- what is not finite -----------------------------------------------------------------------------------------------


def refused(step: OptimiserStep, number: int) -> str:
    before = snapshot(step)
    with pytest.raises(UserError) as raised:
        step(*batch(), step=number, lr=1e-2)
    assert same_bits(step.state(), before), "the update was made"
    message = one_line(raised.value)
    assert f"step {number + 1}:" in message
    assert "--train.lr" in message
    return message


PARAMETERS = [name for name, _ in build(config()).named_parameters()]


@pytest.mark.parametrize("name", PARAMETERS)
def test_nan_in_any_weight_stops_before_the_update(name):
    step = optimiser(config())
    step(*batch(1), step=0, lr=1e-2)  # so that there are moments to keep
    weight = step.parameters[name].data
    # The row of a token that occurs, and a position that is used; in other tensors any place will do.
    weight.flatten()[int(batch()[0][0, 0]) * 32 if name == "embedding.weight" else 0] = math.nan
    message = refused(step, 3)
    assert "loss nan" in message
    assert f"first not finite: weight {name};" in message


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embedding.weight", "method.blocks.1.ffn.down.weight", "norm.weight"])
def test_infinity_in_a_weight_stops_before_the_update(name, value):
    step = optimiser(config())
    step.parameters[name].data.flatten()[0] = value
    assert "not finite" in refused(step, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_gradient_that_is_not_finite_stops_before_the_update_and_is_named(value, monkeypatch):
    """1e30 is finite, but its square and therefore the norm are not, so it cannot be clipped."""
    step = optimiser(config())
    step(*batch(1), step=0, lr=1e-2)
    add = step._add_gradient

    def poisoned(part):
        add(part)
        gradients(step)["method.blocks.2.router.hidden.bias"][3] = value

    monkeypatch.setattr(step, "_add_gradient", poisoned)
    message = refused(step, 4)
    assert "loss nan" not in message
    if value != 1e30:
        assert "method.blocks.2.router.hidden.bias" in message


def test_a_refused_step_leaves_no_trace_in_the_next():
    disturbed, calm = (optimiser(config()) for _ in range(2))
    for step in (disturbed, calm):
        step(*batch(0), step=0, lr=1e-2)
    weight = disturbed.parameters["norm.weight"].data
    held = weight.clone()
    weight[0] = math.nan
    refused(disturbed, 1)
    weight.copy_(held)
    for step in (disturbed, calm):
        step(*batch(1), step=1, lr=1e-2)
    assert same_bits(disturbed.state(), calm.state())


# --- state ------------------------------------------------------------------------------------------------------------


def test_state_loaded_elsewhere_goes_on_bit_for_bit():
    run = config(dropout=0.1, weight_decay=0.1, clip=0.5)
    one, other = optimiser(run), optimiser(config(seed=5, dropout=0.1, weight_decay=0.1, clip=0.5))
    other.config = run.train
    for number in range(3):
        one(*batch(number), step=number, lr=1e-2)
    saved = snapshot(one)
    assert not same_bits(other.state(), saved)
    other.load_state(saved, 3)
    assert same_bits(other.state(), saved)
    results = [step(*batch(3), step=3, lr=5e-3) for step in (one, other)]
    assert results[0] == results[1]
    assert same_bits(one.state(), other.state())
    assert not same_bits(one.state(), saved)


def test_loading_copies_the_tensors():
    step = optimiser(config())
    saved, held = snapshot(step), snapshot(step)
    step.load_state(saved, 0)
    step(*batch(), step=0, lr=1e-2)
    assert same_bits(saved, held)


def test_state_of_another_model_is_refused():
    saved = optimiser(config("dense")).state()
    with pytest.raises(UserError, match=r"does not fit this model at model\.method\.blocks") as raised:
        optimiser(config("tsa")).load_state(saved, 1)
    assert "--out" in one_line(raised.value)
    wider = optimiser(config("dense", d_ff=128))
    with pytest.raises(UserError, match="does not fit this model"):
        wider.load_state(saved, 1)


def test_no_ranks_but_one_need_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.join(CPU)
    assert (ranks.rank, ranks.world, ranks.total(5), ranks.max(7)) == (0, 1, 5, 7)
    value = torch.ones(3)
    assert ranks.sum(value) is value
    ranks.wait()
    assert not torch.distributed.is_initialized()


def test_every_weight_and_gradient_is_aligned_in_its_buffer():
    """Compiled code expects aligned weights; a GPU faults if they are not."""
    step = optimiser(config("tsa"))
    first = min(p.data_ptr() for p in step.parameters.values())
    assert {(p.data_ptr() - first) % 256 for p in step.parameters.values()} == {0}
    assert {(g.data_ptr() - step.gradient.data_ptr()) % 256 for g in step.gradients} == {0}


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")
@pytest.mark.filterwarnings("default")  # the compiler's own warnings are shown, but are not errors
def test_a_compiled_step_computes_the_same_and_is_compiled_once():
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    results = []
    for compiled in ("off", "on"):
        step = optimiser(config("tsa", compile=compiled, dropout=0.0, n_layer=5))
        results.append([step(*batch(), step=number, lr=0.01) for number in range(3)])
    kinds = {"the first block", "blocks with a gate", "the loss"}
    assert dynamo.utils.counters["stats"]["unique_graphs"] == len(kinds), "however many blocks there are"
    for plain, fused in zip(*results, strict=True):
        assert fused.task == pytest.approx(plain.task, rel=1e-5)
        assert fused.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
