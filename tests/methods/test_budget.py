"""Budget routing: the budget is met in training and in evaluation, and skipped tokens are unchanged."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokendepth.config import BudgetConfig, ModelConfig, RunConfig, TrainConfig
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.methods.budget import SMALLEST_DRAW, Budget, between, quantile
from tokendepth.model import Block, Context, LanguageModel, Rows
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

TIME, VOCABULARY = 16, 11
MODEL = ModelConfig(d_model=32, n_layer=3, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=VOCABULARY)


def budget(**knobs) -> LanguageModel:
    """With routers that distinguish tokens, and updates as large as the state."""
    model = build(RunConfig(model=MODEL, method=BudgetConfig(**knobs)))
    with torch.no_grad():
        for name, matrix in model.method.named_parameters():
            if matrix.ndim == 2:
                matrix.mul_((1.0 if "router" in name else 0.2) / matrix.std())
    return model


def method_of(model: LanguageModel) -> Budget:
    assert isinstance(model.method, Budget)
    return model.method


def tokens(batch: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, TIME), generator=torch.Generator().manual_seed(seed))


# --- the threshold ----------------------------------------------------------------------------------------------------


@given(
    scores=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40, unique=True),
    share=st.floats(0, 1),
)
def test_the_named_share_of_different_scores_is_above_the_quantile(scores, share):
    above = (torch.tensor(scores) > quantile(torch.tensor(scores), 1 - share)).sum().item()
    assert above == len(scores) - round(torch.tensor(1 - share).mul(len(scores)).item())


def test_a_calibrated_threshold_lies_between_two_scores():
    """Hard and sparse round differently, so the decision for a token exactly at the threshold would be arbitrary."""
    scores = torch.tensor([[0.0, 4.0, 1.0, 2.0]])
    assert [float(between(scores, level)) for level in (0.0, 0.25, 0.5, 1.0)] == [-0.5, 0.5, 1.5, 4.0]
    tiny = torch.tensor([1.0, 1.0 + 2.0**-23])
    assert (tiny > between(tiny, 0.5)).tolist() == [False, True], "two neighbours among the numbers"


def test_each_sequence_has_its_own_quantile_of_all_scores():
    scores = torch.arange(8.0).view(2, 4)  # 0 1 2 3 | 4 5 6 7
    thresholds = quantile(scores, torch.tensor([[0.25], [0.75]]))
    assert thresholds.tolist() == [[1.0], [5.0]], "two scores are not above 1, six are not above 5"


# --- the update -------------------------------------------------------------------------------------------------------


def test_an_active_token_keeps_the_sigmoid_of_its_score_and_a_skipped_one_is_untouched():
    """By hand for the first routed block: s = -r(norm(h)), h + sigmoid(s) * attention, then the same with the FFN."""
    method = method_of(budget().eval())
    h = torch.randn(2, TIME, 32, generator=torch.Generator().manual_seed(1))
    decisions = torch.rand(2, 2, TIME, generator=torch.Generator().manual_seed(2)) < 0.5
    decisions[1] = False  # the last block skips all tokens
    with torch.no_grad():
        out = method(h, Context("sparse", decisions=decisions)).hidden
        stem, block = method.blocks[0](h, Context()), method.blocks[1]
        normed = (stem - stem.mean(-1, keepdim=True)) / (stem.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        keep = torch.sigmoid(-block.router(normed))[..., None]
        after = stem + keep * block.attention(block.norm_attention(stem), Context())
        after = after + keep * block.ffn(block.norm_ffn(after))
    active = decisions[0]
    assert active.any()
    assert not active.all()
    torch.testing.assert_close(out[active], after[active], rtol=1e-5, atol=1e-5)
    assert torch.equal(out[~active], stem[~active])


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.4, 1.0])
def test_training_holds_the_budget_at_every_step(share):
    model = budget(budget=share, dial=False).train()
    work = model(tokens()).trace.work
    tokens_in_all = 8 * TIME
    for layer in work[1:]:
        assert layer.sum() == tokens_in_all - round((1 - share) * tokens_in_all)


def test_the_dial_gives_every_sequence_a_budget_of_its_own():
    method = method_of(budget(dial=True))
    draws = method._draw(4000, torch.device("cpu"))
    assert draws.shape == (4000, 1)
    assert SMALLEST_DRAW <= draws.min() < 0.2 < 0.95 < draws.max() <= 1
    assert draws.mean() == pytest.approx(SMALLEST_DRAW + (1 - SMALLEST_DRAW) / 3, abs=0.02), "the mean of u squared"
    work = budget(dial=True).train()(tokens(64)).trace.work[1:]
    per_sequence = work.mean((0, 2))
    assert per_sequence.std() > 0.1


def test_at_full_budget_there_is_nothing_to_learn_from_the_full_pass():
    """Both passes are then the same computation: no divergence, and the same loss."""
    model = budget(budget=1.0, dial=False, distill=2.0).train()
    ids = tokens()
    out = model(ids[:, :-1], targets=ids[:, 1:])
    task = F.cross_entropy(out.logits.detach().flatten(0, 1), ids[:, 1:].flatten())
    assert out.losses["distillation"].item() == pytest.approx(0, abs=1e-6)
    assert out.losses["full_budget"].item() == pytest.approx(task.item(), rel=1e-6)


def test_distillation_is_the_divergence_from_the_full_pass_where_a_loss_is_taken():
    model = budget(budget=0.4, dial=False, distill=3.0).train()
    ids = tokens()
    targets = ids.clone()
    targets[:, : TIME // 2] = -100
    out = model(ids, targets=targets)
    with torch.no_grad():  # the pass at full budget, by another model with the same weights
        full_model = budget(budget=1.0, dial=False, distill=0).train()
        full_model.load_state_dict(model.state_dict())
        full = F.log_softmax(full_model(ids).logits, -1)
    own = F.log_softmax(out.logits.detach(), -1)
    divergence = (full.exp() * (full - own)).sum(-1)[:, TIME // 2 :].mean()
    assert out.losses["distillation"].item() == pytest.approx(3 * divergence.item(), rel=1e-4)
    assert divergence > 1e-4, "the two passes differ"


# --- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.25, 0.4, 0.7, 1.0])
def test_calibration_is_exact_on_its_own_data(share):
    model, ids = budget().eval(), tokens(16)
    calibrate_on(model, ids, share)
    with torch.no_grad():
        work = model(ids, execution="hard").trace.work
    for layer in work[1:]:
        assert layer.sum() == ids.numel() - round((1 - share) * ids.numel())


def test_thresholds_are_not_rounded_with_the_weights():
    """In bfloat16 a threshold would be off by up to 0.4% and select other tokens."""
    model = budget().eval()
    calibrate_on(model, tokens(), 0.4)
    before = method_of(model).thresholds
    assert model.bfloat16().norm.weight.dtype == torch.bfloat16
    assert method_of(model).thresholds == before
    assert before != [float(torch.tensor(value).bfloat16()) for value in before]


def test_a_decision_does_not_depend_on_the_batch_it_is_made_in():
    model, ids = budget().eval(), tokens(16)
    calibrate_on(model, ids, 0.4)
    with torch.no_grad():
        together = model(ids, execution="hard").trace.work
        alone = torch.cat([model(row[None], execution="hard").trace.work for row in ids], dim=1)
    assert torch.equal(together, alone)


def test_soft_is_hard_and_says_so():
    model, ids = budget().eval(), tokens()
    calibrate_on(model, ids, 0.4)
    assert not model.method.has_soft
    with torch.no_grad():
        soft, hard = (model(ids, execution=execution) for execution in ("soft", "hard"))
    assert torch.equal(soft.logits, hard.logits)


def test_random_routing_has_no_router_and_keeps_its_budget():
    model = build(RunConfig(model=MODEL, method=BudgetConfig(budget=0.3, routing="random")))
    assert not model.method.routers()
    ids = torch.randint(VOCABULARY, (400, TIME), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        work = model.eval()(ids, execution="hard").trace.work[1:]
    # There are 11 x 16 different (token, position) pairs, so the standard error is about 0.035 per layer.
    assert work.mean() == pytest.approx(0.3, abs=3 * math.sqrt(0.21 / (11 * 16 * 2)))
    assert model.train()(tokens(64)).trace.work[1:].mean() == pytest.approx(0.45, abs=0.1), "the dial's mean"


# --- skipping while training ------------------------------------------------------------------------------------------


def masking(block: Block) -> Callable[..., Tensor]:
    """A `Block.forward` that computes all rows and discards those that were not chosen."""
    plain = block.forward

    def forward(h: Tensor, ctx: Context, rows: Rows, gate: Tensor) -> Tensor:
        assert rows.chosen is not None, "training at a fixed budget gathers rows"
        return plain(h, ctx, gate=gate * rows.active)

    return forward


@pytest.mark.parametrize("distill", [0.0, 1.0])
def test_training_that_skips_is_training_that_masks(distill):
    """At a fixed budget, training gathers the active rows; a gate of zeros and ones on all rows must give the same."""
    ids = tokens(6)

    def gradients(masked: bool) -> tuple[Tensor, list[Tensor]]:
        model = budget(budget=0.4, dial=False, distill=distill).train()
        if masked:
            for block in method_of(model)._routed():
                block.forward = masking(block)
        out = model(ids[:, :-1], targets=ids[:, 1:])
        loss = F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten()) + sum(out.losses.values())
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    (loss, found), (masked_loss, expected) = gradients(masked=False), gradients(masked=True)
    assert loss.item() == pytest.approx(masked_loss.item(), rel=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_hundred_steps_that_skip_lose_what_a_hundred_that_mask_lose():
    def losses(masked: bool) -> list[float]:
        model = budget(budget=0.4, dial=False, distill=0.0).train()
        if masked:
            for block in method_of(model)._routed():
                block.forward = masking(block)
        step = OptimiserStep(model, TrainConfig(batch_size=4, dtype="float32"), torch.device("cpu"), Ranks())
        batches = [tokens(4, seed=number).numpy() for number in range(100)]
        return [step(ids[:, :-1], ids[:, 1:], step=n, lr=1e-3).task for n, ids in enumerate(batches)]

    assert losses(masked=False) == pytest.approx(losses(masked=True), abs=1e-3)


def test_training_at_a_fixed_budget_skips_products():
    counted = {
        share: count_flops(lambda share=share: budget(budget=share, dial=False, distill=0).train()(tokens(8)))
        for share in (0.25, 0.5, 1.0)
    }
    row = 2 * (2 * 32 * 32 + 2 * 32 * 48)  # query, output projection and feed-forward of one token
    skipped = 2 * 8 * TIME * row  # in two routed blocks
    assert counted[1.0] - counted[0.5] == skipped * 0.5
    assert counted[1.0] - counted[0.25] == skipped * 0.75


@torch.no_grad()
def test_dice_know_where_a_token_stands_on_every_kind_of_block():
    """Otherwise a token would be skipped at all positions or at none, and no threshold could meet a budget."""
    for positions in ("learned", "rotary"):
        config = ModelConfig(d_model=32, n_layer=3, n_head=4, d_ff=64, context=64, vocab_size=11, positions=positions)
        model = build(RunConfig(model=config, method=BudgetConfig(routing="random"))).eval()
        ids = torch.zeros(8, 64, dtype=torch.long)  # one token, repeated
        shares = calibrate_on(model, ids, 0.4)
        work = model(ids, execution="hard").trace.work[1:]
        assert work.mean((1, 2)).tolist() == pytest.approx([0.4, 0.4], abs=0.02), positions
        assert shares.mean() == pytest.approx(0.4, abs=0.02)
