"""Early exit by hand: the mean over exits, the oracles, the exit distribution, and the cost of tokens that exited."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import EarlyExitConfig, ModelConfig, RunConfig
from tokendepth.measure.flops import count_flops
from tokendepth.methods import build
from tokendepth.methods.early_exit import NEVER, Confidence, exit_distribution, oracle_exit
from tokendepth.model import LanguageModel

LAYERS, TIME = 3, 12
MODEL = ModelConfig(d_model=32, n_layer=LAYERS, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)


def early_exit(**knobs) -> LanguageModel:
    """With matrices large enough that exits give different predictions."""
    model = build(RunConfig(model=MODEL, method=EarlyExitConfig(**knobs))).eval()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


def tokens(batch: int = 4, time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(seed))


def exits_by_hand(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """The logits of every exit if every token goes through every block."""
    h, ctx = model.entering(ids, "soft")
    logits = []
    for block in model.method.blocks:
        h = block(h, ctx)
        logits.append(model.readout(h))
    return logits


# --- training: the mean over exits ------------------------------------------------------------------------------------


def test_the_loss_is_the_uniform_mean_over_the_exits():
    model, ids = early_exit().train(), tokens(time=TIME + 1)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, :5] = -100  # no loss at these positions
    out = model(inputs, targets=targets)
    per_exit = [F.cross_entropy(x.flatten(0, 1), targets.flatten()) for x in exits_by_hand(model, inputs)]
    total = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()) + sum(out.losses.values())
    assert len(per_exit) == LAYERS
    assert float(total.detach()) == pytest.approx(float(sum(per_exit).detach()) / LAYERS, rel=1e-5)
    assert max(per_exit) - min(per_exit) > 0.01, "the exits differ, so the mean is none of them"


def test_without_targets_there_is_no_loss_of_its_own():
    assert early_exit().train()(tokens()).losses == {}


# --- confidence -------------------------------------------------------------------------------------------------------


def test_confidence_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])  # 0.75 and 0.5
    assert Confidence()(logits).tolist() == pytest.approx([0.75, 0.5])


@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_a_token_keeps_the_answer_with_which_it_left(execution):
    model, ids = early_exit(threshold=0.4), tokens(16)
    with torch.no_grad():
        out = model(ids, execution=execution)
        first = exits_by_hand(model, ids)[0]
    left = out.trace.work[1] == 0
    assert torch.equal(left, first.softmax(-1).amax(-1) > 0.4)
    assert 0 < left.float().mean() < 1
    assert (out.logits - first)[left].abs().max() < 1e-5
    assert (out.logits - first)[~left].abs().max() > 1e-2
    assert (out.trace.work[2] <= out.trace.work[1]).all(), "who has left does not come back"


def test_the_dial_sets_the_threshold_and_never_is_the_whole_model():
    model, ids = early_exit(threshold=0.4), tokens(16)
    dial = model.method.dial(MODEL, model.method.config)
    assert (dial.name, dial.own, dial.points[0], dial.calibrated) == ("threshold", 0.4, NEVER, False)
    left = []
    with torch.no_grad():
        for value in (NEVER, 0.6, 0.4, 0.3):
            model.method.set_point(value)
            out = model(ids, execution="hard")
            left.append(int((out.trace.work[1:] == 0).sum()))
            if value == NEVER:
                torch.testing.assert_close(out.logits, exits_by_hand(model, ids)[-1])
    assert 0 == left[0] < left[1] < left[2] < left[3]


def test_unfrozen_a_token_keeps_its_answer_but_is_computed_on():
    model, ids = early_exit(threshold=0.4), tokens(16)
    model.method.freezes = False
    with torch.no_grad():
        out, exits = model(ids, execution="hard"), exits_by_hand(model, ids)
    confident = torch.stack([x.softmax(-1).amax(-1) > 0.4 for x in exits[:-1]] + [torch.ones(16, TIME).bool()])
    taken = confident.float().argmax(0)
    assert set(taken.unique().tolist()) == {0, 1, 2}, "every exit is taken by some"
    by_hand = torch.stack(exits).gather(0, taken[None, ..., None].expand(1, 16, TIME, 11))[0]
    assert (out.logits - by_hand).abs().max() < 1e-5
    assert torch.equal(out.trace.work.sum(0), taken + 1.0), "counted as if it had been skipped"


def test_the_active_fraction_counts_the_stem_once():
    """Of 4 tokens, 3 enter block 1 and 1 enters block 2: alpha = (3 + 1) / 8, and 8 of 12 token-layers ran."""
    decisions = torch.tensor([[[1, 1, 1, 0]], [[0, 1, 0, 0]]], dtype=torch.bool)
    totals = early_exit()(tokens(1, 4), execution="sparse", decisions=decisions).trace.totals()
    assert totals.active_fraction == 0.5
    assert totals.tlops == 8
    assert totals.tlops_saved == pytest.approx(1 - 8 / 12)


def test_a_token_that_left_is_still_seen_through_each_blocks_own_projections():
    model, ids = early_exit(), tokens(1)
    decisions = torch.ones(2, 1, TIME, dtype=torch.bool)
    decisions[:, 0, 3] = False
    with torch.no_grad():
        before = model(ids, execution="sparse", decisions=decisions).logits
        for block in model.method.blocks[1:]:
            kept = block.attention.qkv.weight.clone()
            block.attention.qkv.weight[MODEL.d_model :] *= 1.5  # keys and values only
            after = model(ids, execution="sparse", decisions=decisions).logits
            block.attention.qkv.weight.copy_(kept)
            assert torch.equal(after[0, 3], before[0, 3])
            assert (after - before)[0, 4:].abs().max() > 1e-3


@pytest.mark.parametrize(("exit", "reads"), [("confidence", True), ("learned", False)])
def test_what_a_token_costs(exit, reads):
    """Confidence reads the head after each executed block; learned halting costs a product, and the head once."""
    model, ids = early_exit(exit=exit), tokens(1)
    d, head = MODEL.d_model, 2 * MODEL.d_model * MODEL.vocab_size
    rest = 4 * d * d + 4 * d * MODEL.d_ff + 4 * TIME * d
    decisions = torch.zeros(2, 1, TIME, dtype=torch.bool)
    none = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert none == TIME * (4 * d * d * LAYERS + rest + head + (0 if reads else 2 * 2 * d))
    decisions[0, 0, 5] = True
    one = count_flops(lambda: model(ids, execution="sparse", decisions=decisions))
    assert one - none == rest + (head if reads else 0)


# --- learned halting --------------------------------------------------------------------------------------------------


def test_the_exit_distribution_by_hand():
    """chi = 0.25, 0.5: q = 0.25, 0.75 * 0.5, 0.75 * 0.5."""
    halting = torch.tensor([[math.log(0.25 / 0.75)], [0.0]])
    q = exit_distribution(halting).exp()
    assert q.flatten().tolist() == pytest.approx([0.25, 0.375, 0.375])


def test_the_oracles_by_hand():
    """Scores of three exits for four tokens; each additional block costs 0.1."""
    likelihood = torch.tensor([[[-2.0, -0.5, -1.0, -1.0]], [[-1.0, -0.45, -1.0, -0.9]], [[-0.5, -0.4, -0.85, -0.5]]])
    assert oracle_exit(likelihood, 0.1, 0.0).tolist() == [[2, 0, 0, 2]]
    assert oracle_exit(likelihood, 0.0, 0.0).tolist() == [[2, 2, 2, 2]]
    correct = torch.tensor([[[0.0, 1.0, 0.0, 0.0]], [[1.0, 1.0, 0.0, 0.0]], [[1.0, 0.0, 1.0, 0.0]]])
    assert oracle_exit(correct, 0.1, 0.0).tolist() == [[1, 0, 2, 0]], "the first that is right; the first if none is"
    assert oracle_exit(correct, 0.0, 0.0).tolist() == [[1, 0, 2, 0]]


def test_a_smoothed_oracle_asks_the_neighbours():
    """Weights exp(-|t - t'|^2 / sigma): with sigma = 1 / ln 4 a neighbour counts a quarter."""
    scores = torch.tensor([[[1.0, 0.0, 1.0]], [[0.0, 0.4, 0.0]]])
    sigma = 1 / math.log(4)
    # In the middle: 0.25 + 0 + 0.25 = 0.5 against 0.4; by itself, the token would choose the second exit.
    assert oracle_exit(scores, 0.0, 0.0).tolist() == [[0, 1, 0]]
    assert oracle_exit(scores, 0.0, sigma).tolist() == [[0, 0, 0]]


@torch.no_grad()
@pytest.mark.parametrize("oracle", ["likelihood", "correctness"])
def test_the_halting_loss_is_the_cross_entropy_to_the_oracle(oracle):
    model, ids = early_exit(exit="learned", oracle=oracle, halting_loss=2.0).train(), tokens(time=TIME + 1)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    loss = model(inputs, targets=targets).losses["halting"]
    logits = exits_by_hand(model, inputs)
    (h, ctx), chi = model.entering(inputs, "soft"), []
    for block in model.method.blocks[:-1]:
        h = block(h, ctx)
        chi.append(torch.sigmoid(model.method.exit.logit(h)[..., 0]))
    expected = 0.0
    for b in range(len(ids)):
        for t in range(TIME):
            target, scores = targets[b, t], []
            for n, exit_logits in enumerate(logits, 1):
                right = float(exit_logits[b, t].argmax() == target)
                likelihood = float(exit_logits[b, t].log_softmax(-1)[target])
                scores.append((likelihood if oracle == "likelihood" else right) - 0.1 * n)
            q = [chi[0][b, t], (1 - chi[0][b, t]) * chi[1][b, t], (1 - chi[0][b, t]) * (1 - chi[1][b, t])]
            expected -= math.log(q[scores.index(max(scores))]) / targets.numel()
    assert float(loss) == pytest.approx(2 * expected, rel=1e-4)


def test_the_halting_loss_moves_the_halting_unit_alone():
    model, ids = early_exit(exit="learned").train(), tokens(time=TIME + 1)
    model(ids[:, :-1], targets=ids[:, 1:]).losses["halting"].backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"method.exit.logit.weight", "method.exit.logit.bias"}


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_a_token_leaves_when_chi_exceeds_the_threshold(threshold):
    for chi, stays in ((threshold - 0.01, 1), (threshold + 0.01, 0)):
        model = early_exit(exit="learned", threshold=threshold)
        with torch.no_grad():
            model.method.exit.logit.weight.zero_()
            model.method.exit.logit.bias.fill_(math.log(chi / (1 - chi)))
        assert (model(tokens(), execution="hard").trace.work[1:] == stays).all()
