"""ACT by hand: weights that add up to 1, the ponder cost and its gradient, frozen states, and what a step costs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokendepth.config import ACTConfig, ModelConfig, RunConfig
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.model import Context, LanguageModel

STEPS, TIME = 4, 12
MODEL = ModelConfig(d_model=32, n_layer=STEPS, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)


def act(**knobs) -> LanguageModel:
    """Large matrices and a halting unit with large logits, so that tokens halt at different steps."""
    model = build(RunConfig(model=MODEL, method=ACTConfig(**knobs))).eval()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
        if model.method.halting:
            model.method.halting.logit.bias.fill_(-0.5)
    return model


def idle(h: float, **knobs) -> LanguageModel:
    """A block that changes nothing and a halting unit that always returns `h`."""
    model = act(**knobs)
    block = model.method.block
    with torch.no_grad():
        for zeroed in (
            block.attention.out.weight,
            block.ffn.down.weight,
            block.ffn.down.bias,
            model.method.signal.weight,
        ):
            zeroed.zero_()
        model.method.halting.logit.weight.zero_()
        model.method.halting.logit.bias.fill_(math.log(h / (1 - h)))
    return model


def states(batch: int = 4) -> Tensor:
    return torch.randn(batch, TIME, MODEL.d_model, generator=torch.Generator().manual_seed(0))


# --- the weighted sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_the_equations_by_hand(execution):
    """Step by step and token by token: halted states frozen, others attending to them, output the weighted sum."""
    model, h = act(), states()
    method = model.method
    with torch.no_grad():
        output = method(h, Context(execution))
        state, weighted = h, torch.zeros_like(h)
        chances = torch.zeros(*h.shape[:2])  # sum of h so far
        running = torch.ones(*h.shape[:2], dtype=torch.bool)
        ponder = torch.zeros(*h.shape[:2])
        for n in range(STEPS):
            stepped = method.block(state + method.signal.weight[n], Context())
            assert torch.equal(output.trace.work[n], running.float())
            for b, t in running.nonzero().tolist():
                state = state.clone()
                state[b, t] = stepped[b, t]
                chance = torch.sigmoid(method.halting.logit(state[b, t]))[0]
                halts = n == STEPS - 1 or chances[b, t] + chance >= 0.99
                p = 1 - chances[b, t] if halts else chance
                weighted[b, t] += p * state[b, t]
                ponder[b, t] += 1 + (p if halts else 0)
                chances[b, t] += chance
                running[b, t] = not halts
    assert (output.hidden - weighted).abs().max() < 1e-5 * weighted.abs().max()
    assert float(output.losses["ponder"]) == pytest.approx(0.01 * float(ponder.mean()), rel=1e-5)
    assert len(output.trace.work.sum(0).unique()) > 2, "tokens took different numbers of steps"


@pytest.mark.parametrize(("h", "steps"), [(0.1, 4), (0.34, 3), (0.4, 3), (0.5, 2), (0.73, 2), (0.995, 1)])
def test_the_weights_add_up_to_one(h, steps):
    """States do not change from step to step, so the output shows the sum of the weights; 0.995 halts at once."""
    model, hidden = idle(h), states()
    for execution in ("hard", "sparse"):
        with torch.no_grad():
            output = model.method(hidden, Context(execution))
        assert torch.allclose(output.hidden, hidden, rtol=1e-6, atol=1e-6)
        assert (output.trace.work.sum(0) == steps).all()


def test_at_first_two_steps_are_taken():
    """b = 1: h = 0.73, so the sum exceeds 0.99 at the second step."""
    model = build(RunConfig(model=MODEL, method=ACTConfig()))
    assert model.method.halting.logit.bias.item() == 1.0
    assert (model(torch.randint(11, (4, TIME))).trace.work.sum(0) == 2).all()


@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_where_positions_enter(kind):
    """Rotary positions at every step, as in the Universal Transformer; learned ones once, outside the steps."""
    model = build(RunConfig(model=replace(MODEL, positions=kind), method=ACTConfig())).eval()
    entered, turned = [], []
    model.positions.register_forward_hook(lambda *_: entered.append(True))
    model.method.block.register_forward_pre_hook(lambda _, given: turned.append(given[1].rotation))
    model(torch.randint(11, (2, TIME)), execution="hard")
    assert len(turned) == STEPS
    assert all((rotation is not None) == (kind == "rotary") for rotation in turned)
    assert len(entered) == (kind == "learned")


# --- the ponder cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "steps"), [(0.1, 4), (0.4, 3), (0.73, 2), (0.995, 1)])
def test_the_ponder_cost_and_its_gradient(h, steps):
    """rho = N + R with R = 1 - (N - 1) h; each h before the last has gradient -1, the last has none."""
    model = idle(h, ponder_cost=1.0)
    ponder = model.method(states(), Context()).losses["ponder"]
    assert float(ponder.detach()) == pytest.approx(steps + 1 - (steps - 1) * h, rel=1e-5)
    (gradient,) = torch.autograd.grad(ponder, model.method.halting.logit.bias)
    assert gradient.item() == pytest.approx(-(steps - 1) * h * (1 - h), rel=1e-4)


def test_the_task_also_teaches_when_to_halt():
    """The output is sum p s, so its gradient with respect to h is the difference between steps: not zero."""
    model = act(ponder_cost=0.0)
    model.method(states(), Context()).hidden.square().sum().backward()
    assert model.method.halting.logit.weight.grad.abs().max() > 1e-3


# --- frozen and skipped -----------------------------------------------------------------------------------------------


def test_a_halted_token_is_frozen_and_still_seen():
    """Token 3 halts after the first step: its output is its first state, and later tokens still attend to it."""
    model, h = act(), states(1)
    decisions = torch.ones(STEPS - 1, 1, TIME, dtype=torch.bool)
    decisions[:, 0, 3] = False
    with torch.no_grad():
        first = model.method.block(h + model.method.signal.weight[0], Context())
        before = model.method(h, Context("sparse", decisions=decisions)).hidden
        changed = h.clone()
        changed[0, 3] = states(2)[1, 3]
        after = model.method(changed, Context("sparse", decisions=decisions)).hidden
    assert torch.allclose(before[0, 3], first[0, 3], atol=1e-6)
    assert (after - before)[0, 4:].abs().amax(-1).min() > 1e-4
    assert torch.equal(after[0, :3], before[0, :3])


def test_what_a_step_costs():
    model, ids = act(), torch.randint(11, (2, TIME))
    d = MODEL.d_model
    rest = 4 * d * d + 4 * d * MODEL.d_ff + 4 * TIME * d
    decisions = torch.zeros(STEPS - 1, 2, TIME, dtype=torch.bool)
    none = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert none == ids.numel() * (4 * d * d * STEPS + rest + (STEPS - 1) * 2 * d + 2 * d * MODEL.vocab_size)
    decisions[1, 0, 5] = True
    assert count_flops(lambda: model(ids, execution="sparse", decisions=decisions)) == none + rest


def test_one_block_serves_all_steps():
    counts = [sum(p.numel() for p in act(max_steps=n).method.block.parameters()) for n in (2, 9)]
    assert counts[0] == counts[1]
    assert len(act(max_steps=9).method.sites(4)) == act(max_steps=9).method.cache_layers == 9
    assert len(act().method.sites(4)) == STEPS
    single = act(max_steps=1)
    assert single.method.routers() == []
    assert single(torch.randint(11, (1, TIME)), execution="sparse").trace.totals().active_fraction == 1
