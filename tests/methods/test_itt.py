"""Inner Thinking by hand: the recurrence, its selection, and what a thinking step costs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import ITTConfig, ModelConfig, RunConfig
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.model import Context, LanguageModel

TIME, STEPS = 10, 3
MODEL = ModelConfig(d_model=32, n_layer=2, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)


def itt(**knobs) -> LanguageModel:
    """With large matrices, and with encodings and scales that all differ from each other and from 1."""
    model = build(RunConfig(model=MODEL, method=ITTConfig(**{"steps": STEPS, **knobs}))).eval()
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
        for encoding in (*model.method.blocks[1].phi, model.method.blocks[1].alpha):
            encoding.copy_(torch.rand(encoding.shape, generator=dice) + 0.5)
    return model


def states(batch: int = 1) -> Tensor:
    return torch.randn(batch, TIME, MODEL.d_model, generator=torch.Generator().manual_seed(0))


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_the_recurrence_by_hand(execution):
    """Y'(t) = alpha w f(Y) for chosen tokens, else Y; Y(t) = Y(0) phi_0 + Y'(1) phi_1 + ... + Y'(t) phi_t."""
    model, h, places = itt(), states(), ([0, 3, 7], [3, 4])
    decisions = torch.zeros(2, 1, TIME, dtype=torch.bool)
    for step, chosen in enumerate(places):
        decisions[step, 0, chosen] = True
    block = model.method.blocks[1]
    with torch.no_grad():
        output = model.method(h, Context(execution, decisions=decisions))
        y0 = block(model.method.blocks[0](h, Context()), Context())
        y, thoughts = y0, []
        for step, chosen in enumerate(places):
            w = y @ block.selectors[step].router.weight[0]
            thought = y.clone()
            thought[:, chosen] = (block.alpha[step] * w[:, chosen])[..., None] * block(y[:, chosen], Context())
            thoughts.append(thought)
            y = y0 * block.phi[0] + sum(thoughts[i] * block.phi[i + 1] for i in range(step + 1))
        assert close(output.hidden, y)


def test_training_and_evaluation_agree_on_the_same_selection():
    model, h = itt(capacity=0.5), states(3)
    with torch.no_grad():
        trained = model.train().method(h, Context())
        assert (trained.trace.work[[2, 3]].sum(-1) == 5).all()
        for execution in ("hard", "sparse"):
            decisions = trained.trace.work[2:].bool()
            executed = model.eval().method(h, Context(execution, decisions=decisions))
            assert close(executed.hidden, trained.hidden)


def test_the_highest_weights_think():
    model, h = itt(capacity=0.3).train(), states(3)
    block = model.method.blocks[1]
    with torch.no_grad():
        block.alpha.fill_(-1.0)  # it scales the result but does not affect which tokens think
        work = model.method(h, Context()).trace.work[2]
        w = block.selectors[0].router(block(model.method.blocks[0](h, Context()), Context()))
    assert torch.equal(work.bool(), w >= w.sort(1, descending=True).values[:, 2:3])


@pytest.mark.parametrize("decides", ["router", "predictor"])
def test_the_decision_loss_by_hand(decides):
    model, h = itt(decides=decides, decision_loss=0.5).train(), states(3)
    logits: list[Tensor] = []
    for router in model.method.routers():
        router.register_forward_hook(lambda _m, _i, out: logits.append(out))
    with torch.no_grad():
        output = model.method(h, Context())
    by_hand = [F.binary_cross_entropy(x.sigmoid(), w) for x, w in zip(logits, output.trace.work[2:], strict=True)]
    assert float(output.losses["decision"]) == pytest.approx(0.5 * float(sum(by_hand)) / 2, rel=1e-4)


def test_with_a_predictor_the_task_alone_teaches_the_model():
    model = itt().train()
    model.method(states(), Context()).losses["decision"].backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached
    assert all(".predictor." in name for name in reached)


def test_every_other_layer_thinks_and_starts_as_a_correction():
    model = build(RunConfig(model=MODEL, method=ITTConfig()))
    sites = model.method.sites(4)
    assert [site.name for site in sites] == ["block 0", "block 1", *(f"block 1 step {n}" for n in (1, 2, 3))]
    assert [site.routed for site in sites] == [False, False, True, True, True]
    assert model.method.cache_layers == 5
    assert [float(phi.detach().mean()) for phi in model.method.blocks[1].phi] == pytest.approx([1.0, 0.1, 0.1, 0.1])


def test_what_a_thinking_step_costs():
    model, ids = itt(), torch.randint(11, (2, TIME))
    d = MODEL.d_model
    block = 8 * d * d + 4 * d * MODEL.d_ff + 4 * TIME * d
    selector = 2 * d + 2 * (16 * d + 16)
    decisions = torch.zeros(STEPS - 1, 2, TIME, dtype=torch.bool)
    none = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert none == ids.numel() * (2 * block + 2 * selector + 2 * d * MODEL.vocab_size)
    decisions[1, 1, 4] = True
    assert count_flops(lambda: model(ids, execution="sparse", decisions=decisions)) == none + block
