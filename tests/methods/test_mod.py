"""Mixture-of-Depths by hand: which tokens are selected, what a weight scales, and what skipped ones cost."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import MoDConfig, ModelConfig, RunConfig
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.methods.mod import MoDBlock, Selected, top_k
from tokendepth.model import Context, LanguageModel, Rows

TIME = 16
MODEL = ModelConfig(d_model=32, n_layer=4, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)


def mod(shape: ModelConfig = MODEL, **knobs) -> LanguageModel:
    """With updates as large as the state, so that skipping shows."""
    model = build(RunConfig(model=shape, method=MoDConfig(**knobs)))
    with torch.no_grad():
        for block in model.method.blocks:
            for matrix in (block.attention.out.weight, block.ffn.down.weight):
                matrix.mul_(0.2 / matrix.std())
    return model


def states(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randn(batch, time, MODEL.d_model, generator=torch.Generator().manual_seed(0))


def alone(block: MoDBlock, h: Tensor, places: list[int]) -> Tensor:
    """The plain block's result for the tokens at `places` in one sequence, as if there were no others."""
    return block(h[:1, places], Context())


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


# --- which tokens are selected ----------------------------------------------------------------------------------------


def test_the_threshold_by_hand():
    """C = 2 of S = 5: the weights above P_0.6 = 0.3 are 0.9 and 0.4, and they keep their order."""
    weights = torch.tensor([[0.4, -1.0, 0.3, 0.9, 0.1]])
    chosen = top_k(weights, 0.4, Context())
    assert chosen.places.tolist() == [[0, 3]]
    assert chosen.as_mask(weights).tolist() == [[1, 0, 0, 1, 0]]
    assert torch.equal(chosen.as_mask(weights) == 1, weights > weights.sort().values[0, 2])


def test_a_share_is_one_of_the_real_tokens():
    """C = 0.4: 2 of 5 real tokens and 1 of 3; the highest weights are at padding, which is never selected."""
    weights = torch.tensor([[9.0, 0.4, -1.0, 0.3, 0.9, 0.1], [9.0, 8.0, 7.0, 0.1, 0.3, 0.2]])
    valid = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]], dtype=torch.bool)
    chosen = top_k(weights, 0.4, Context(valid=valid))
    assert chosen.as_mask(weights).tolist() == [[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0]]
    assert chosen.context(Context(valid=valid)).valid.sum(1).tolist() == [2, 1]


@pytest.mark.parametrize(("capacity", "k"), [(0.125, 2), (0.5, 8), (1.0, 16), (0.01, 1)])
def test_a_capacity_is_held_in_every_sequence(capacity, k):
    model = mod(capacity=capacity).train()
    work = model(torch.randint(11, (3, TIME))).trace.work
    assert (work[[1, 3]].sum(-1) == k).all()
    assert (work[[0, 2]] == 1).all()


def test_every_other_block_is_routed_by_a_router_of_its_own():
    assert [site.routed for site in mod().method.sites(8)] == [False, True, False, True]
    assert [site.routed for site in mod(every=1).method.sites(8)] == [True] * 4
    for decides in ("router", "predictor"):
        assert len({id(router) for router in mod(decides=decides).method.routers()}) == 2


def test_in_evaluation_a_token_is_selected_where_its_own_logit_is_above_zero():
    model, h = mod(decides="router").eval(), states(8)
    with torch.no_grad():
        entered = model.method.blocks[0](h, Context())
        active = model.method(h, Context("hard")).trace.work[1]
        assert torch.equal(active, (model.method.blocks[1].selector.router(entered) > 0).float())
    assert 0 < active.mean() < 1


# --- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_eq_1_by_hand(execution):
    """Tokens 1, 4 and 9: x + r (block(x) - x) among themselves; all others bit for bit unchanged."""
    model, h, places = mod(every=1).eval(), states(1), [1, 4, 9]
    block = model.method.blocks[0]
    active = torch.zeros(4, 1, TIME, dtype=torch.bool)
    active[0, 0, places] = True
    with torch.no_grad():
        hidden = model.method(h, Context(execution, decisions=active)).hidden  # the other blocks select no token
        r = block.selector.router(h)[:, places, None]
        expected = h[:, places] + r * (alone(block, h, places) - h[:, places])
    others = ~active[0, 0]
    assert close(hidden[:, places], expected)
    assert torch.equal(hidden[:, others], h[:, others])


def test_training_and_evaluation_agree_on_the_same_selection():
    model, h = mod(every=1, capacity=0.25), states()
    with torch.no_grad():
        trained = model.train().method(h, Context())
        decisions = trained.trace.work.bool()
        for execution in ("hard", "sparse"):
            executed = model.eval().method(h, Context(execution, decisions=decisions))
            assert close(executed.hidden, trained.hidden)


def test_the_routers_gradient_is_that_of_its_weights():
    """d(x + r f)/dr = f for a selected token, and nothing for the others."""
    model, h = mod(replace(MODEL, n_layer=1), every=1, capacity=0.25).train(), states(1)
    block, weights = model.method.blocks[0], []
    block.selector.router.register_forward_hook(lambda _m, _i, out: weights.append(out))
    output = model.method(h, Context())
    (grad,) = torch.autograd.grad(output.hidden.sum(), weights)
    places = output.trace.work[0, 0].nonzero().flatten().tolist()
    assert len(places) == 4
    update = alone(block, h, places) - h[:, places]
    assert close(grad[0, places], update[0].sum(-1).detach())
    assert grad[0, [t for t in range(TIME) if t not in places]].eq(0).all()


def test_a_skipped_token_leaves_no_key_behind():
    """Changing a skipped token's state affects no other token in that block; a selected one's affects later ones."""
    model, h = mod().eval(), states(1)
    block = model.method.blocks[1]
    active = torch.zeros(1, TIME, dtype=torch.bool)
    active[0, [2, 7, 12]] = True
    for place, moves in ((5, False), (2, True)):
        changed = h.clone()
        changed[0, place] = torch.randn(MODEL.d_model, generator=torch.Generator().manual_seed(1))
        for execution in ("hard", "sparse"):
            with torch.no_grad():
                before, after = (
                    block(x.clone(), Context(execution), Rows(active), keys="active")[0, 7:] for x in (h, changed)
                )
            assert ((after - before).abs().max() > 1e-3) == moves


def test_a_skipped_token_costs_the_decision_alone():
    model, ids = mod().eval(), torch.randint(11, (2, TIME))
    decisions = torch.zeros(2, 2, TIME, dtype=torch.bool)
    d, ff = MODEL.d_model, MODEL.d_ff
    block = 8 * d * d + 4 * d * ff + 4 * TIME * d
    router = 2 * d + 2 * (16 * d + 16)  # w, and the predictor: d to 16 to 1
    none = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert none == ids.numel() * (2 * block + 2 * router + 2 * d * MODEL.vocab_size)
    decisions[0, 1, 3] = True
    assert count_flops(lambda: model(ids, execution="sparse", decisions=decisions)) == none + block


# --- the decision's loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decides", ["router", "predictor"])
def test_the_loss_of_a_decision_is_the_cross_entropy_with_the_selection(decides):
    model, h = mod(decides=decides, every=4, capacity=0.25, decision_loss=0.5).train(), states()
    with torch.no_grad():
        output = model.method(h, Context())
        for block in model.method.blocks[:3]:
            h = block(h, Context())
        last = model.method.blocks[3]
        logit = last.selector.router(h) if decides == "router" else last.selector.predictor(h)
    chosen = output.trace.work[3]
    by_hand = -(chosen * F.logsigmoid(logit) + (1 - chosen) * F.logsigmoid(-logit)).mean()
    assert float(output.losses["decision"]) == pytest.approx(0.5 * float(by_hand), rel=1e-5)


def test_the_predictor_teaches_the_language_model_nothing():
    ids = torch.randint(11, (4, TIME), generator=torch.Generator().manual_seed(2))
    reached = {}
    for decides in ("router", "predictor"):
        model = mod(decides=decides).train()
        model(ids).losses["decision"].backward()
        reached[decides] = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert all(".predictor." in name for name in reached["predictor"])
    assert "embedding.weight" in reached["router"]


def test_taking_and_putting():
    h, chosen = states(), Selected(torch.tensor([[0, 5], [3, 15]]), None)
    rows = chosen.take(h)
    assert torch.equal(rows, torch.stack([h[0, [0, 5]], h[1, [3, 15]]]))
    added = chosen.add(h, rows)
    assert torch.equal(added[0, 5], 2 * h[0, 5])
    assert math.isclose(float((added != h).any(-1).sum()), 4)


def test_places_that_only_fill_up_are_neither_counted_nor_added_to():
    h, there = states(), torch.tensor([[True, False], [True, True]])
    chosen = Selected(torch.tensor([[0, 5], [3, 15]]), there)
    added = chosen.add(h, chosen.take(h))
    assert (added != h).any(-1).nonzero().tolist() == [[0, 0], [1, 3], [1, 15]]
    assert chosen.as_mask(h[..., 0]).nonzero().tolist() == [[0, 0], [1, 3], [1, 15]]


def test_those_among_the_chosen_are_named_by_their_place_in_the_sequence():
    outer = Selected(torch.tensor([[2, 5, 7], [0, 1, 9]]), None)
    inner = outer.among(Selected(torch.tensor([[0, 2], [1, 2]]), None))
    assert inner.places.tolist() == [[2, 7], [1, 9]]
