"""Switch by hand: which tokens fit, what the expert adds, the two losses; and that each token has only one expert."""

import math

import pytest
import torch
from torch import Tensor

from tokendepth import methods
from tokendepth.cache import KVCache
from tokendepth.config import ModelConfig, RunConfig, SwitchConfig
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.methods.base import balance_and_z
from tokendepth.methods.switch import SwitchBlock
from tokendepth.model import Context, LanguageModel

TIME = 8
MODEL = ModelConfig(d_model=32, n_layer=2, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)


def switch(**knobs) -> LanguageModel:
    model = build(RunConfig(model=MODEL, method=SwitchConfig(**{"jitter": 0.0, **knobs}))).eval()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


def switched(model: LanguageModel) -> SwitchBlock:
    return model.method.blocks[1]


def states(batch: int = 3) -> Tensor:
    return torch.randn(batch, TIME, MODEL.d_model, generator=torch.Generator().manual_seed(0))


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


# --- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "experts", "room"), [(1.0, 4, 2), (1.25, 4, 3), (1.0, 3, 3), (4.0, 4, 8), (0.1, 4, 1)]
)
def test_eq_3_the_capacity(factor, experts, room):
    assert switched(switch(capacity_factor=factor, experts=experts)).capacity == room


def test_who_comes_too_late_overflows():
    """Two places per expert: the third and later tokens for the same expert are dropped, in every sequence."""
    block = switched(switch(capacity_factor=1.0))
    expert = torch.tensor([[0, 0, 1, 0, 0, 1, 1, 2], [3, 3, 3, 3, 0, 0, 0, 0]])
    place = block.queue(expert, Context())
    assert place.tolist() == [[1, 2, 1, 3, 4, 2, 3, 1], [1, 2, 3, 4, 1, 2, 3, 4]]
    assert (place <= block.capacity).sum().item() == 5 + 4


def test_the_queue_goes_on_where_the_cache_ended_and_padding_does_not_stand_in_it():
    model = switch()
    block, expert = switched(model), torch.tensor([[0, 1, 0, 0, 1, 0]])
    cache = KVCache(MODEL, 1, TIME, like=model.norm.weight.detach())
    places = torch.arange(6)[None].split([3, 1, 2], dim=1)
    contexts = [Context(cache=cache, writes=columns) for columns in places]
    parts = [block.queue(part, ctx) for part, ctx in zip(expert.split([3, 1, 2], dim=1), contexts, strict=True)]
    assert torch.cat(parts, 1).tolist() == block.queue(expert, Context()).tolist() == [[1, 1, 2, 3, 2, 4]]
    valid = torch.tensor([[False, False, True, True, True, True]])
    assert block.queue(expert, Context(valid=valid))[0, 2:].tolist() == [1, 2, 1, 3]


def test_a_large_capacity_drops_nothing():
    model = switch(capacity_factor=4.0)
    with torch.no_grad():
        assert (model(torch.randint(11, (4, TIME))).trace.work == 1).all()


# --- eq. 1 and 2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["training", "hard", "sparse"])
def test_a_token_gets_its_experts_answer_times_its_probability_or_nothing(mode):
    model, h = switch(capacity_factor=0.75), states()
    block = switched(model)
    with torch.no_grad():
        entered = model.method.blocks[0](h, Context())
        attended = block.attend(entered, Context())
        x = block.norm_ffn(attended)
        output = model.train(mode == "training").method(h, Context("sparse" if mode == "sparse" else "hard"))
        seen = [[0] * 4 for _ in h]
        for b in range(len(h)):
            for t in range(TIME):
                p = (block.router.weight @ x[b, t]).softmax(0)
                i = int(p.argmax())
                seen[b][i] += 1
                expected = attended[b, t] + (p[i] * block.experts[i](x[b, t]) if seen[b][i] <= 2 else 0)
                assert close(output.hidden[b, t], expected)
                assert output.trace.work[1, b, t] == (seen[b][i] <= 2)
    assert 0 < output.trace.work[1].mean() < 1


def test_one_expert_runs_for_a_token_and_none_for_one_that_overflowed():
    model, ids = switch(), torch.randint(11, (2, TIME))
    d, network = MODEL.d_model, 4 * MODEL.d_model * MODEL.d_ff
    attention = 8 * d * d + 4 * TIME * d
    decisions = torch.zeros(1, 2, TIME, dtype=torch.bool)
    none = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert none == ids.numel() * (2 * attention + network + 2 * 4 * d + 2 * d * MODEL.vocab_size)
    decisions[0, 1, 2] = True
    assert count_flops(lambda: model(ids, execution="sparse", decisions=decisions)) == none + network
    assert count_flops(lambda: model(ids, execution="hard")) == none + ids.numel() * network


# --- eq. 4 to 6, and z ------------------------------------------------------------------------------------------------


def test_the_losses_by_hand():
    """Two experts and four tokens: three with p = (0.75, 0.25) and one with (0.5, 0.5) plus a little."""
    logits = torch.tensor([[[math.log(3.0), 0.0], [math.log(3.0), 0.0]], [[math.log(3.0), 0.0], [0.0, 1e-6]]])
    balance, z = (float(x) for x in balance_and_z(logits, logits.argmax(-1), Context()))
    f, mean_p = (0.75, 0.25), ((3 * 0.75 + 0.5) / 4, (3 * 0.25 + 0.5) / 4)
    assert balance == pytest.approx(2 * (f[0] * mean_p[0] + f[1] * mean_p[1]), rel=1e-5)
    assert z == pytest.approx((3 * math.log(4.0) ** 2 + math.log(2.0) ** 2) / 4, rel=1e-5)


def test_balance_is_least_when_all_experts_get_alike():
    even = 9 * torch.eye(4)[torch.arange(8) % 4][None]
    skewed = 9 * torch.eye(4)[torch.zeros(8, dtype=torch.long)][None]
    balances = [balance_and_z(logits, logits.argmax(-1), Context())[0].item() for logits in (even, skewed)]
    assert balances[0] == pytest.approx(1.0, rel=1e-4)
    assert balances[1] == pytest.approx(4.0, rel=1e-2)


def test_the_losses_carry_their_weights():
    model, h = switch(balance_loss=0.5, z_loss=0.25).train(), states()
    block, losses = switched(model), model.method(h, Context()).losses
    with torch.no_grad():
        x = block.norm_ffn(block.attend(model.method.blocks[0](h, Context()), Context()))
        logits = block.router(x)
        balance, z = (float(x) for x in balance_and_z(logits, logits.argmax(-1), Context()))
    assert float(losses["balance"].detach()) == pytest.approx(0.5 * balance, rel=1e-5)
    assert float(losses["z"].detach()) == pytest.approx(0.25 * z, rel=1e-5)


def test_the_losses_are_means_over_the_switched_blocks(monkeypatch):
    """The paper sums them; with the mean a weight means the same at any depth."""
    of_blocks = iter([(1.0, 10.0), (3.0, 30.0)])
    monkeypatch.setattr(methods.switch, "balance_and_z", lambda *_: tuple(map(torch.tensor, next(of_blocks))))
    losses = switch(every=1, balance_loss=0.5, z_loss=0.25).train().method(states(), Context()).losses
    assert {name: float(loss) for name, loss in losses.items()} == {"balance": 0.5 * 2, "z": 0.25 * 20}


def test_jitter_is_for_training():
    torch.manual_seed(0)
    block, x = switched(switch(jitter=0.1)), states()
    with torch.no_grad():
        exact = block.route(x)[0]
        assert torch.equal(block.eval().route(x)[0], exact)
        jittered = block.train().route(x)[0]
    bound = 0.1 * x.abs() @ block.router.weight.abs().T
    assert not torch.equal(jittered, exact)
    assert ((jittered - exact).abs() <= bound + 1e-5).all()
