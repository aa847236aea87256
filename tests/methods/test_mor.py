"""Mixture-of-Recursions by hand: capacities and filtering, both kinds of routing, both kinds of keys, the losses."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import ModelConfig, MoRConfig, RunConfig
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.model import Context, LanguageModel

TIME, RECURSIONS = 12, 3
MODEL = ModelConfig(d_model=32, n_layer=5, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)

each_kv = pytest.mark.parametrize("kv", ["recursion", "shared"])
each_execution = pytest.mark.parametrize("execution", ["hard", "sparse"])


def mor(**knobs) -> LanguageModel:
    """With large matrices and an alpha of 1, so that each recursion matters."""
    model = build(RunConfig(model=MODEL, method=MoRConfig(**{"recursions": RECURSIONS, "alpha": 1.0, **knobs}))).eval()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


def states(batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(batch, TIME, MODEL.d_model, generator=torch.Generator().manual_seed(seed))


def choice(*places: list[int]) -> Tensor:
    """`[recursion 2 and 3, 1, time]` with these places active."""
    active = torch.zeros(len(places), 1, TIME, dtype=torch.bool)
    for recursion, chosen in enumerate(places):
        active[recursion, 0, chosen] = True
    return active


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_the_layers_in_the_middle_are_one():
    model = mor()
    assert len(model.method.shared) == 1
    names = [site.name for site in model.method.sites(4)]
    assert names == ["first", "recursion 1", "recursion 2", "recursion 3", "last"]
    assert [site.routed for site in model.method.sites(4)] == [False, False, True, True, False]


def test_a_recursion_counts_all_its_blocks():
    """Six layers, recursions of two blocks: a token that stops after the first goes through 4 of 6."""
    model = build(RunConfig(model=replace(MODEL, n_layer=6), method=MoRConfig())).eval()
    decisions = torch.zeros(1, 1, TIME, dtype=torch.bool)
    with torch.no_grad():
        totals = model(torch.zeros(1, TIME, dtype=torch.long), execution="sparse", decisions=decisions).trace.totals()
    assert totals.tlops == TIME * 4
    assert totals.tlops_saved == pytest.approx(2 / 6)


# --- expert choice ----------------------------------------------------------------------------------------------------


@each_kv
def test_the_capacities_are_thirds_and_each_filters_the_last(kv):
    work = mor(kv=kv).train()(torch.randint(11, (4, TIME))).trace.work[1:-1]
    assert [int(n) for n in work.sum(-1).unique(dim=1).flatten()] == [12, 8, 4]
    assert (work[1:] <= work[:-1]).all()


@each_execution
def test_expert_choice_by_hand(execution):
    """H + g Phi(H), with Phi's own residual inside, for the chosen tokens among themselves."""
    model, h = mor(), states(1)
    method, (second, third) = model.method, ([1, 4, 9], [4, 9])
    with torch.no_grad():
        output = method(h, Context(execution, decisions=choice(second, third)))
        h = method.first(h, Context())
        for router, places in zip(method.recursion_routers, (list(range(TIME)), second, third), strict=True):
            g = torch.sigmoid(h[:, places] @ router.weight[0])
            phi = method.shared[0](h[:, places], Context())
            h = h.clone()
            h[:, places] += g[..., None] * phi
        assert close(output.hidden, method.last(h, Context()))


@each_kv
def test_training_and_evaluation_agree_on_the_same_selection(kv):
    model, h = mor(kv=kv), states()
    with torch.no_grad():
        trained = model.train().method(h, Context())
        for execution in ("hard", "sparse"):
            decisions = trained.trace.work[2:-1].bool()
            executed = model.eval().method(h, Context(execution, decisions=decisions))
            assert close(executed.hidden, trained.hidden)
            assert torch.equal(executed.trace.work, trained.trace.work)


def test_in_evaluation_who_was_not_chosen_does_not_come_back():
    """Recursion 3 would take every token, but takes only those that recursion 2 took, with a logit above 0."""
    model, h = mor(), states(16)
    with torch.no_grad():
        entered = model.method.first(h, Context())
        entered = entered + torch.sigmoid(model.method.recursion_routers[0](entered))[..., None] * model.method.shared[
            0
        ](entered, Context())
        wanted = model.method.recursion_routers[1](entered) > 0
        model.method.recursion_routers[2].forward = lambda state: torch.ones(state.shape[:-1])
        work = model.method(h, Context("hard")).trace.work
    assert torch.equal(work[2].bool(), wanted)
    assert torch.equal(work[3], work[2])
    assert 0 < work[2].mean() < 1


def test_the_decision_loss_is_over_those_that_are_still_in():
    model, h = mor(decision_loss=0.5).train(), states()
    logits: list[Tensor] = []
    for router in model.method.recursion_routers:
        router.register_forward_hook(lambda _m, _i, out: logits.append(out))
    with torch.no_grad():
        loss = model.method(h, Context()).losses["decision"]
    assert [logit.shape[1] for logit in logits] == [12, 12, 8]
    by_hand = 0.0
    for logit, k in zip(logits[1:], (8, 4), strict=True):
        chosen = logit >= logit.sort(1, descending=True).values[:, k - 1 : k]
        by_hand -= float(torch.where(chosen, F.logsigmoid(logit), F.logsigmoid(-logit)).mean()) / 2
    assert float(loss) == pytest.approx(0.5 * by_hand, rel=1e-5)


# --- token choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["soft", "hard", "sparse"])
def test_token_choice_by_hand(execution):
    """A token of depth i goes through Phi i times, among those at least as deep, and ends at H^1 + g Phi(H)."""
    model, h = mor(routing="token"), states(1, seed=41)
    method = model.method
    model.train(execution == "soft")  # training uses the same path
    with torch.no_grad():
        output = method(h, Context(execution))
        entry = method.first(h, Context())
        p = (entry @ method.recursion_routers[0].weight.T).softmax(-1)[0]
        depth, state, expected = p.argmax(-1), entry.clone(), entry.clone()
        for recursion in range(RECURSIONS):
            places = (depth >= recursion).nonzero().flatten().tolist()
            state[:, places] = method.shared[0](state[:, places], Context())
            for t in (depth == recursion).nonzero().flatten().tolist():
                expected[0, t] = p[t, recursion] * state[0, t] + entry[0, t]
        assert close(output.hidden, method.last(expected, Context()))
    assert sorted(set(depth.tolist())) == [0, 1, 2], "every depth is under test"
    assert torch.equal(output.trace.work[1:-1].sum(0)[0] - 1, depth.float())


def test_the_losses_of_token_choice_by_hand():
    """Three tokens with p = (1/2, 1/4, 1/4) and one with (1/4, 1/4, 1/2)."""
    model = mor(routing="token", balance_loss=2.0, z_loss=3.0)
    logits = torch.tensor([[[2.0, 1.0, 1.0]] * 3 + [[1.0, 1.0, 2.0]]]).log()
    losses = model.method._token_losses(logits, logits.argmax(-1), Context())
    mean_p = (7 / 16, 1 / 4, 5 / 16)
    assert float(losses["balance"]) == pytest.approx(2 * 3 * (0.75 * mean_p[0] + 0.25 * mean_p[2]), rel=1e-5)
    assert float(losses["z"]) == pytest.approx(3 * math.log(4) ** 2, rel=1e-5)


# --- keys and values --------------------------------------------------------------------------------------------------


@each_execution
@pytest.mark.parametrize(("kv", "seen"), [("recursion", False), ("shared", True)])
def test_who_is_seen_in_a_later_recursion(kv, seen, execution):
    """Token 3 stops after the first recursion: later ones see its keys and values only if they are shared."""
    model, h = mor(kv=kv), states(1)
    method, active = model.method, choice([5, 8])[0]
    changed = h.clone()
    changed[0, 3] = states(1, seed=1)[0, 3]
    ctx, kept = Context(execution), [[], []]
    with torch.no_grad():
        for x, left in zip((h, changed), kept, strict=True):
            method._recur(0, x, ctx, torch.ones(1, TIME, dtype=torch.bool), left)
        before, after = (method._recur(1, h, ctx, active, left)[0, [5, 8]] for left in kept)
    assert ((after - before).abs().max() > 1e-3) == seen


@each_kv
def test_what_a_recursion_costs_and_keeps(kv):
    model, ids = mor(kv=kv), torch.randint(11, (2, TIME))
    d = MODEL.d_model
    block = 8 * d * d + 4 * d * MODEL.d_ff + 4 * TIME * d
    decisions = torch.zeros(RECURSIONS - 1, 2, TIME, dtype=torch.bool)
    none = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert none == ids.numel() * (3 * block + RECURSIONS * 2 * d + 2 * d * MODEL.vocab_size)
    decisions[1, 0, 5] = True
    one = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert one - none == (block if kv == "recursion" else block - 4 * d * d)
    assert model.method.cache_layers == (5 if kv == "recursion" else 3)
