"""Span routing: one decision, one gather and one scatter for several blocks, and how updates are carried over."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import tiny
from tokendepth import data
from tokendepth.cache import KVCache
from tokendepth.config import DenseConfig, ModelConfig, RunConfig, SpanConfig
from tokendepth.context import Context
from tokendepth.data.bpe import train_bpe
from tokendepth.errors import UserError
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.measure.evaluate import evaluate, load_model
from tokendepth.measure.flops import count_flops, training_flops
from tokendepth.methods import build
from tokendepth.methods.base import divergence
from tokendepth.methods.budget import gain_target
from tokendepth.methods.mod import Selected
from tokendepth.methods.one_span import ROOM, SpanBlocks
from tokendepth.methods.span import Span
from tokendepth.methods.span_bypass import Bypass
from tokendepth.methods.span_carry import Passing
from tokendepth.methods.span_deciders import Boundary, Entropy, WordEnds, ends_word, ratio_loss, taught_loss
from tokendepth.model import Block, LanguageModel
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

TIME, VOCABULARY = 16, 11
MODEL = ModelConfig(d_model=32, n_layer=5, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=VOCABULARY)
MODERN = replace(
    MODEL, norm="rms", positions="rotary", n_kv_head=2, ffn="swiglu", ffn_bias=False, qk_norm=True, tie_head=False
)

each_shape = pytest.mark.parametrize("shape", [MODEL, MODERN], ids=["classic", "modern"])
each_execution = pytest.mark.parametrize("execution", ["hard", "sparse"])


def span(shape: ModelConfig = MODEL, **knobs) -> LanguageModel:
    """1 + 3 + 1 blocks, with a router that distinguishes tokens and updates as large as the state."""
    model = build(RunConfig(model=shape, method=SpanConfig(**knobs)))
    with torch.no_grad():
        for matrix in (p for p in model.method.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


def method_of(model: LanguageModel) -> Span:
    assert isinstance(model.method, Span)
    return model.method


def span_blocks(model: LanguageModel) -> SpanBlocks:
    method = method_of(model)
    return method._blocks_of_span(method)


def tokens(batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, TIME), generator=torch.Generator().manual_seed(seed))


def given(active: Tensor) -> Tensor:
    """The decision `[batch, time]` for each of the three blocks."""
    return active.expand(3, *active.shape)


def some(ids: Tensor) -> Tensor:
    return torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.4


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def dense_like(model: LanguageModel, *, skip: range = range(0)) -> LanguageModel:
    """The dense model with the same weights, without the blocks `skip`."""
    shape = replace(model.config, n_layer=model.config.n_layer - len(skip))
    dense = build(RunConfig(model=shape, method=DenseConfig())).eval()
    left = [n for n in range(model.config.n_layer) if n not in skip]
    weights = {}
    for name, value in model.state_dict().items():
        if name.startswith("method.blocks."):
            _, _, number, rest = name.split(".", 3)
            if int(number) in left:
                weights[f"method.blocks.{left.index(int(number))}.{rest}"] = value
        elif not name.startswith("method."):
            weights[name] = value
    dense.load_state_dict(weights)
    return dense


# --- the update -------------------------------------------------------------------------------------------------------


@each_shape
@each_execution
@pytest.mark.parametrize(
    "knobs",
    [
        {"decide": "rule", "carry": "none"},
        {"decide": "rule", "carry": "last"},
        {"decide": "gain", "carry": "last"},
        {"decide": "entropy", "carry": "last"},
        {"decide": "gain", "keys": "all", "carry": "none"},
        {"decide": "dice", "keys": "all", "carry": "last"},
    ],
    ids=lambda knobs: "-".join(knobs.values()),
)
@torch.no_grad()
def test_a_text_of_which_every_token_takes_the_span_is_that_of_the_dense_model(shape, execution, knobs):
    """If updates are not weighted, as they are by a score."""
    model, ids = span(shape, **knobs).eval(), tokens()
    out = model(ids, execution=execution, decisions=given(torch.ones_like(ids, dtype=torch.bool)))
    assert close(out.logits, dense_like(model)(ids).logits)


@each_shape
@each_execution
@pytest.mark.parametrize("carry", ["none", "last", "smooth"])
@torch.no_grad()
def test_a_text_of_which_no_token_takes_the_span_is_that_of_the_model_without_it(shape, execution, carry):
    model, ids = span(shape, carry=carry).eval(), tokens()
    out = model(ids, execution=execution, decisions=given(torch.zeros_like(ids, dtype=torch.bool)))
    assert torch.equal(out.logits, dense_like(model, skip=method_of(model).span)(ids).logits)


@each_execution
@torch.no_grad()
def test_active_tokens_are_a_shorter_sequence_at_their_true_positions(execution):
    """By hand: the plain blocks on tokens 1, 4 and 9 of a text, at their own positions, as if there were no others.

    Each weighted update is also that of the following tokens, up to the next active one.
    """
    model, ids = span().eval(), tokens(1)
    method, places = method_of(model), [1, 4, 9]
    active = torch.zeros(1, TIME, dtype=torch.bool)
    active[0, places] = True
    embedded, ctx = model.entering(ids, "hard")
    h = method.blocks[0](embedded, ctx)
    rows = h[:, places]
    for n in method.span:
        rows = method.blocks[n](rows, replace(ctx, positions=None))
    score = method.decider(F.layer_norm(h, (32,)), ctx)
    updates = torch.sigmoid(score[:, places, None]) * (rows - h[:, places])
    expected = h.clone()
    for t in range(TIME):
        before = [n for n, place in enumerate(places) if place <= t]
        expected[:, t] += updates[:, before[-1]] if before else 0
    expected = model.readout(method.blocks[-1](expected, ctx))
    assert close(model(ids, execution=execution, decisions=given(active)).logits, expected)


@torch.no_grad()
def test_rotary_positions_are_the_true_ones():
    """The same two active tokens, one position farther apart, attend to each other differently."""
    model, ids = span(MODERN, begin=0, length=5, carry="none").eval(), tokens(1)
    ids[0, 3:7] = torch.tensor([1, 0, 2, 2])
    found = []
    for places in ([3, 5], [3, 6]):
        active = torch.zeros(1, TIME, dtype=torch.bool)
        active[0, places] = True
        hard, sparse = (model(ids, execution=e, decisions=active.expand(5, 1, TIME)).logits for e in ("hard", "sparse"))
        assert close(sparse, hard)
        found.append(hard[0, places[1]])
    assert not close(found[0], found[1])


BY_HAND = {
    # p = 1 (the first), 0.25 and 0.5 by sigmoid(s - tau): z = 8, 0.25 * 16 + 0.75 * 8 = 10, 0.5 * 2 + 0.5 * 10 = 6.
    "smooth": (2.0, [-9.0, 7.0, 2.0 - math.log(3), 2.0, 7.0], [8, 8, 10, 6, 6]),
    # Weighted by sigmoid(s) = 0.5, 0.75 and 0.5, and carried over.
    "last": (-1.0, [0.0, 7.0, math.log(3), 0.0, 7.0], [4, 4, 12, 1, 1]),
}


@pytest.mark.parametrize("carry", BY_HAND)
@torch.no_grad()
def test_carried_updates_by_hand(carry):
    """Tokens 0, 2 and 3 are active; computed for all tokens, and for these as rows with one row of filler."""
    threshold, scores, expected = BY_HAND[carry]
    active, ctx = torch.tensor([[True, False, True, True, False]]), Context(positions=torch.arange(5))
    decider = method_of(span(carry=carry).eval()).decider
    passing = Passing(carry, decider, active, torch.tensor([scores]), threshold, ctx)
    hidden = torch.full((1, 5, 1), 100.0)
    state = hidden + torch.tensor([8.0, 0.0, 16.0, 2.0, 0.0])[None, :, None]
    assert (passing.updated(hidden, state) - hidden).flatten().tolist() == pytest.approx(expected)
    rows, places = torch.tensor([[[8.0], [16.0], [2.0], [-5.0]]]), torch.tensor([[0, 2, 3, 4]])
    assert (passing.updated_by_rows(hidden, rows, places) - hidden).flatten().tolist() == pytest.approx(expected)


# --- the deciders -----------------------------------------------------------------------------------------------------


def boundary(weights: tuple[Tensor, Tensor] | None = None, **knobs) -> Boundary:
    decider = method_of(span(MODERN, decide="boundary", **knobs)).decider
    assert isinstance(decider, Boundary)
    if weights:
        decider.query.weight.data, decider.key.weight.data = weights
    return decider


@torch.no_grad()
def test_boundary_probabilities_by_hand():
    """Neighbouring states that are equal, orthogonal, opposed, and compared after W_k has rotated the earlier one."""
    eye = torch.eye(2)
    states = torch.tensor([[[1.0, 0], [2, 0], [0, 3], [0, -1], [5, 0]]])
    ctx = Context(positions=torch.arange(5))
    assert boundary((eye, eye))(states, ctx)[0].tolist() == pytest.approx([1, 0, 0.5, 1, 0.5])
    turn = torch.tensor([[0.0, -1], [1, 0]])  # by 90 degrees: (x, y) -> (-y, x)
    assert boundary((eye, turn))(states, ctx)[0].tolist() == pytest.approx([1, 0.5, 0, 0.5, 0])


@torch.no_grad()
def test_the_earlier_neighbour_is_the_last_token_that_is_no_padding():
    decider, states = boundary(), torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    plain = decider(states, Context(positions=torch.arange(4)))[0]
    spread, valid = torch.randn(1, 7, 32), torch.tensor([[False, True, True, False, False, True, True]])
    spread[valid] = states[0]
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(decider(spread, Context(valid=valid, positions=positions))[valid], plain)


def test_the_ratio_loss_by_hand():
    """N = 4: 4/3 (3 F G + (1 - F)(1 - G)); only the probabilities have a gradient."""
    p = torch.tensor([[0.25, 0.75]], requires_grad=True)
    half, both = torch.tensor([[False, True]]), torch.tensor([[True, True]])
    assert ratio_loss(p, half, 0.25, Context()).item() == pytest.approx(4 / 3 * (3 * 0.25 + 0.25))
    assert ratio_loss(p, both, 0.25, Context()).item() == pytest.approx(4 / 3 * 3 * 0.5)
    quarter = torch.tensor([[True, False, False, False]])
    assert ratio_loss(quarter.float(), quarter, 0.25, Context()).item() == pytest.approx(1), "as many as wanted"
    ratio_loss(p, both, 0.25, Context()).backward()
    assert p.grad is not None
    assert p.grad[0].tolist() == pytest.approx([2, 2])  # 4/3 (3 F - (1 - F)) over two tokens


def test_the_confidence_is_one_with_a_gradient():
    p = torch.tensor([[0.9, 0.3]], requires_grad=True)
    confidence = boundary().confidence(p, torch.tensor([[True, False]]))
    assert confidence.tolist() == [[1, 1]]
    assert torch.autograd.grad(confidence.sum(), p)[0].tolist() == [[1, -1]]


@pytest.mark.parametrize(("ratio", "fixed"), [(0.03, True), (0.0, False)])
def test_boundaries_are_learned_by_the_ratio_loss_or_held_by_the_quantile(ratio, fixed):
    out = span(MODERN, decide="boundary", ratio_loss=ratio, budget=0.5).train()(tokens(8))
    assert (out.losses.keys() == {"ratio"}) == fixed
    assert bool(out.trace.work[1].sum() == 8 * TIME / 2) != fixed


def taught(**knobs) -> LanguageModel:
    """Tokens 0 and 5 end words."""
    model = span(MODERN, decide="boundary", carry="smooth", taught=0.5, **knobs).train()
    method_of(model).read_vocabulary([b" " if n % 5 == 0 and n < 10 else b"a" for n in range(VOCABULARY)])
    return model


def test_while_boundaries_are_taught_the_ends_of_words_decide():
    model, ids = taught(), torch.tensor([[3, 5, 1, 1, 0, 2, 2, 2] * 2])
    ends = torch.isin(ids, torch.tensor([0, 5])) | (torch.arange(TIME) == 0)
    for done, told in ((0.0, True), (0.49, True), (0.5, False), (1.0, False)):
        method_of(model).set_progress(done)
        out = model(ids)
        assert bool((out.trace.work[1] == ends).all()) == told, "afterwards they decide themselves"
        assert bool(out.losses["taught"] > 0) == told
        assert bool(out.losses["ratio"] > 0) != told
    assert "taught" not in model.eval()(ids).losses


def test_boundaries_learn_what_they_are_taught():
    """A state that depends only on its token is enough to predict whether the token ends a word."""
    model, ids = taught(), tokens(8)
    ends = torch.isin(ids, torch.tensor([0, 5])) | (torch.arange(TIME) == 0)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        model(ids).losses["taught"].backward()
        optimiser.step()
    method_of(model).set_progress(1.0)
    assert ((model(ids).trace.work[1] > 0) == ends).float().mean() > 0.95


def test_the_taught_loss_by_hand():
    """The first token is a boundary whatever it is; probabilities are clamped to 0.001 to 0.999."""
    p, ends = torch.tensor([[0.5, 0.8, 0.25, 1.0]]), torch.tensor([[0.0, 1, 0, 1]])
    expected = -(math.log(0.5) + math.log(0.8) + math.log(0.75) + math.log(0.999)) / 4
    assert taught_loss(p, ends, Context(positions=torch.arange(4))).item() == pytest.approx(expected)


@pytest.mark.parametrize("knobs", [{"decide": "score"}, {"decide": "rule"}, {"decide": "boundary", "ratio_loss": 0.0}])
def test_only_boundaries_with_a_ratio_loss_can_be_taught(knobs):
    with pytest.raises(UserError, match=r"taught is 0\.5; expected 0, since"):
        SpanConfig(taught=0.5, **knobs)


@pytest.mark.parametrize("decide", ["score", "boundary"])
def test_what_is_trained_does_not_depend_on_what_was_calibrated(decide):
    """Each validation calibrates, and a resumed run does not repeat that."""
    model, ids = span(MODERN, decide=decide).train(), tokens()
    before = model(ids)
    calibrate_on(model.eval(), ids, 0.9)
    assert torch.equal(model.train()(ids).logits, before.logits)


def test_the_entropy_is_that_of_what_the_state_predicts():
    model, ids = span(decide="entropy").train(), tokens(6)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[:, :3] = -100
    method, (embedded, ctx) = method_of(model), model.entering(inputs, "hard")
    assert isinstance(method.decider, Entropy)
    head = method.decider.head.weight
    with torch.no_grad():
        head.mul_(50)
        seen = method.seen(method.blocks[0](embedded, ctx), span_blocks(model))
        score = method.decider(seen, ctx)
        predicted = torch.distributions.Categorical(logits=seen @ head.T)
    assert close(score, predicted.entropy())
    assert score.std() > 0.1
    out = model(inputs, targets=targets)
    wanted = F.cross_entropy(predicted.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert out.losses["entropy"].item() == pytest.approx(wanted.item(), rel=1e-5)
    gradients = torch.autograd.grad(out.losses["entropy"], list(model.parameters()), allow_unused=True)
    reached = [name for (name, _), one in zip(model.named_parameters(), gradients, strict=True) if one is not None]
    assert reached == ["method.decider.head.weight"], "and nothing else"


def test_the_gain_is_what_a_token_loses_without_the_span():
    """From the losses of the dense model and of the one without the span, both built as separate models here."""
    model, ids = span(decide="gain").train(), tokens(6)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[:, :3] = -100
    out = model(inputs, targets=targets)
    embedded, ctx = model.entering(inputs, "hard")
    with torch.no_grad():
        without, dense = (
            F.cross_entropy(one(inputs).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(inputs)
            for one in (dense_like(model, skip=method_of(model).span), dense_like(model))
        )
        hidden = method_of(model).blocks[0](embedded, ctx)
        score = method_of(model).decider(method_of(model).seen(hidden, span_blocks(model)), ctx)
    target = gain_target(without - dense)
    assert out.losses["gain"].item() == pytest.approx((score - target)[:, 3:].square().mean().item(), rel=1e-4)
    assert target.std() > 0.1
    for name, gradient in zip(
        dict(model.named_parameters()),
        torch.autograd.grad(out.losses["gain"], list(model.parameters()), allow_unused=True),
        strict=True,
    ):
        assert (gradient is not None) == ("router" in name), "it reaches the router and nothing else"


def test_tokens_that_skip_are_taught_what_they_predict_with_the_span():
    """Tokens that took the span run as if all did; the span and the predictions with it get no gradient."""
    model, ids = span(decide="gain", keys="all", carry="none", draft=0.5).train(), tokens(6)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[:, :3] = -100
    torch.manual_seed(5)
    loss = model(inputs, targets=targets).losses["draft"]
    torch.manual_seed(5)
    skips = torch.rand(inputs.shape) < 0.5
    state, ctx = model.entering(inputs, "hard")
    before = state
    with torch.no_grad():
        for number, block in enumerate(method_of(model).blocks):
            before = state if number == method_of(model).span.start else before
            state = torch.where(skips[..., None], before, state) if number == method_of(model).span.stop else state
            state = block(state, ctx)
        distance = divergence(dense_like(model)(inputs).logits, model.readout(state))
    assert loss.item() == pytest.approx(0.5 * distance[skips & (targets >= 0)].mean().item(), rel=1e-4)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    reached = {name for name, each in zip(dict(model.named_parameters()), gradients, strict=True) if each is not None}
    blocks = {int(name.split(".")[2]) for name in reached if name.startswith("method.blocks.")}
    assert blocks == set(range(len(method_of(model).blocks))) - set(method_of(model).span)


def test_the_gains_scale_by_hand():
    costs = torch.tensor([0.0, 0.1, -0.1, (math.e**2 - 1) / 10])
    assert gain_target(costs).tolist() == pytest.approx([0, math.log(2), -math.log(2), 2])


def test_the_router_of_a_gain_learns_by_that_alone():
    model, ids = span(decide="gain", carry="last").train(), tokens()
    loss = F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    for parameter in method_of(model).decider.parameters():
        assert torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True) == (None,)


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_what_ends_a_word():
    ending = [b" ", b".", b"\n", b"-", "\u2013".encode(), b" the", b"'s", b"<eos>", b""]
    inside = [b"a", b"Z", b"7", b"ing", "\u00e9".encode(), b"\xc3", b"\xa9"]
    assert all(map(ends_word, ending))
    assert not any(map(ends_word, inside))


def test_of_bpe_the_rule_takes_what_begins_a_word():
    """However words are split, the pieces that continue one are skipped."""
    tokenizer = train_bpe(["the theory of words and their wordings, in 1984 theories; "] * 9, 280)
    active = WordEnds(replace(MODEL, vocab_size=tokenizer.vocab_size))
    active.read_vocabulary(tokenizer.spellings())
    ids = tokenizer.encode(" the wordings, theorising")
    pieces = [tokenizer.token_bytes(token) for token in ids]
    assert len(pieces) > 4, "words in several pieces"
    expected = [piece.startswith((b" ", b",")) for piece in pieces]
    assert active(torch.empty(0), Context(ids=torch.tensor([ids])))[0].bool().tolist() == expected
    assert sum(expected) == 4


@pytest.fixture(scope="module")
def ruled(tmp_path_factory) -> Run:
    """A run whose span is taken at word ends."""
    folder = tmp_path_factory.mktemp("ruled")
    return train(tiny(folder, SpanConfig(decide="rule"), steps=2), folder / "run", show=False)


@torch.no_grad()
def test_the_rule_is_read_from_the_vocabulary_and_kept_with_the_weights(ruled):
    model, dataset = load_model(ruled, torch.device("cpu")), data.load(ruled.config.data)
    ids = torch.tensor(dataset.passage("val", 16))[None]
    text = dataset.tokenizer.decode(ids[0].tolist())
    expected = [n == 0 or not character.isalnum() for n, character in enumerate(text)]
    assert 1 < sum(expected) < 16
    for execution in ("hard", "sparse"):
        assert (model(ids, execution=execution).trace.work[1, 0] == 1).tolist() == expected


def test_an_evaluation_tells_both_conventions_and_has_controls(ruled):
    found = evaluate(ruled, timing=False)
    assert found["flops_per_token"] < found["flops_per_token_full_rows"] < found["flops_per_token_dense"]
    assert found["decision_flips"] == 0
    control = found["controls"]["random_decisions_hard"]
    assert control["active_fraction"] == pytest.approx(found["hard"]["active_fraction"], abs=0.05)
    assert found["controls"].keys() == {"random_decisions_hard"}, "there is no router that could be untrained"


@pytest.mark.parametrize("knobs", [{"decide": "rule"}, {"decide": "boundary", "taught": 0.25}], ids=["rule", "taught"])
def test_a_budget_without_room_for_the_word_ends_of_a_text_is_told(knobs):
    """In training there are 1.5 * 0.25 * 16 = 6 rows; half of the sequences have 4 word ends and half have 10."""

    def warning(**more):
        method = method_of(span(**{"budget": 0.25, **knobs, **more}))
        rule = method.decider if isinstance(method.decider, WordEnds) else method.rule
        assert rule is not None
        rule.ends[0] = True
        return method.warning(ids)

    ids = torch.ones(4, TIME, dtype=torch.long)
    ids[:, :4] = 0
    assert warning() is None, "there is room for all"
    ids[:2, :10] = 0
    said = warning()
    assert "word ends are 43.8% of the tokens of this text, but method.budget is 0.25" in said
    assert "room for 37.5% of a sequence, so 29% of word ends skip the span there" in said, "8 of 28"
    assert said.endswith("set --method.budget 0.44")
    assert warning(budget=0.44) is None
    assert warning(anneal=0.5) is None, "which trains with room for everybody"
    assert "word ends are 0.0% of the tokens" in method_of(span(**knobs)).warning(ids), "no vocabulary was read"


def test_only_decisions_by_word_ends_are_checked_against_a_text():
    assert method_of(span(decide="score")).warning(torch.zeros(4, TIME, dtype=torch.long)) is None


def test_training_tells_of_a_budget_that_does_not_fit(tmp_path, capsys):
    (tmp_path / "signs.txt").write_text("ab+-" * 1000)
    config = tiny(tmp_path, SpanConfig(decide="rule"), corpus=f"text:{tmp_path / 'signs.txt'}", steps=1)
    train(config, tmp_path / "run")
    said = " ".join(capsys.readouterr().err.split())
    assert "word ends are 50.0% of the tokens of this text, but method.budget is 0.25" in said


def test_only_a_retrofit_has_a_teacher(tmp_path):
    with pytest.raises(UserError, match=r"method.gain is 'teacher'; expected loss or kl, since only a retrofit has"):
        train(tiny(tmp_path, SpanConfig(decide="gain", gain="teacher")), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_a_rule_has_no_dial_and_nothing_to_train():
    model = span(decide="rule")
    assert model.method.dial(model.config, model.method.config) is None
    assert model.method.batch_statistic is None
    assert isinstance(model.method.routers()[0], WordEnds), "so that it has controls"
    assert not list(model.method.routers()[0].parameters())


@torch.no_grad()
def test_dice_keep_the_share_and_know_where_a_token_stands():
    model = span(MODERN, decide="dice", budget=0.3, carry="none").eval()
    ids = torch.randint(VOCABULARY, (400, TIME), generator=torch.Generator().manual_seed(3))
    work = model(ids, execution="hard").trace.work[1]
    # There are 11 x 16 different (token, position) pairs.
    assert work.mean() == pytest.approx(0.3, abs=3 * math.sqrt(0.21 / (11 * 16)))
    same = model(torch.zeros(1, TIME, dtype=torch.long), execution="hard").trace.work[1]
    assert 0 < same.mean() < 1


# --- which tokens are active ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.25, 0.4, 1.0])
def test_calibration_is_exact_on_its_own_data_and_keeps_the_first_token(share):
    for carry in ("none", "last"):
        model, ids = span(carry=carry).eval(), tokens(16)
        shares = calibrate_on(model, ids, share)
        with torch.no_grad():
            work = model(ids, execution="hard").trace.work
        wanted = ids.numel() - round((1 - share) * ids.numel())
        carried = carry == "last"
        assert work[1].sum() == max(wanted, len(ids) if carried else 0)
        assert shares.tolist() == pytest.approx(work[1].mean(1).tolist())
        assert torch.equal(work[1], work[2])
        assert torch.equal(work[1], work[3])
        assert bool((work[1, :, 0] == 1).all()) == (carried or share == 1)
        assert (work[[0, 4]] == 1).all()


@pytest.mark.parametrize("share", [0.05, 0.25, 0.4, 1.0])
def test_training_holds_the_budget_but_for_what_finds_no_room(share):
    work = span(budget=share).train()(tokens(8)).trace.work
    wanted = 8 * TIME - round((1 - share) * 8 * TIME)
    assert work[1].sum() <= max(wanted, 8)
    assert work[1].sum() >= 0.8 * wanted
    assert (work[1, :, 0] == 1).all()
    assert (work[1].sum(1) <= -(-ROOM * share * TIME // 1)).all()


def test_who_finds_no_room_scores_lowest_of_its_sequence():
    share = ROOM * 0.25  # 6 of 16
    scores = torch.arange(32.0).view(2, 16).flip(1)
    chosen = Selected.above(scores, torch.tensor(15.0), share, None)
    assert chosen.as_mask(scores).sum(1).tolist() == [0, 6], "sixteen are above the threshold"
    assert chosen.places[1].tolist() == [0, 1, 2, 3, 4, 5]
    mixed = torch.tensor([[1.0, 9.0, 2.0, 8.0, 3.0, 7.0, *[0.0] * 10]])
    chosen = Selected.above(mixed, torch.tensor(2.5), share, None)
    assert chosen.there is not None
    assert chosen.places[0, chosen.there[0]].tolist() == [1, 3, 4, 5], "first, and in order"
    assert chosen.there[0].tolist() == [True] * 4 + [False] * 2


# --- skipping ---------------------------------------------------------------------------------------------------------


PACKED = (
    {"keys": "active"}, {"keys": "all"}, {"width": 48}, {"carry": "none"}, {"decide": "dice"},
    {"decide": "boundary", "carry": "smooth"}, {"decide": "boundary", "ratio_loss": 0.0},
)  # fmt: skip


@pytest.mark.parametrize("knobs", PACKED, ids=str)
@each_shape
def test_training_that_packs_is_training_that_masks(shape, knobs):
    """Losses and gradients, against the reference execution with training's decisions."""
    ids = tokens(6)

    def gradients(masked: bool) -> tuple[float, list[Tensor]]:
        model = span(shape, budget=0.4, **knobs).train()
        taken = model(ids[:, :-1]).trace.work[1:4] > 0.5
        if masked:
            method_of(model.eval()).decider.train()  # boundaries have a gradient of their own in training
        out = model(ids[:, :-1], execution="hard", decisions=taken) if masked else model(ids[:, :-1])
        loss = F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))

    (loss, found), (masked_loss, expected) = gradients(masked=False), gradients(masked=True)
    assert loss == pytest.approx(masked_loss, rel=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("knobs", [{"carry": "none"}, {"carry": "last"}, {"keys": "all"}], ids=str)
@each_shape
def test_where_all_tokens_take_the_span_training_is_that_of_the_dense_model(shape, knobs):
    ids, found = tokens(), []
    for method in (DenseConfig(), SpanConfig(decide="dice", budget=1.0, **knobs)):
        model = build(RunConfig(model=shape, method=method)).train()
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
    dense, routed = found
    assert dense.keys() == routed.keys()
    for name, gradient in dense.items():
        torch.testing.assert_close(routed[name], gradient, rtol=1e-4, atol=1e-7)


def test_training_flops_are_those_of_the_room():
    config = RunConfig(model=MODEL, method=SpanConfig(budget=0.25))
    dense = RunConfig(model=MODEL, method=DenseConfig())
    rows = 6 / 16  # room for 6 of 16 tokens, in three blocks, forward and backward
    token = 2 * (4 * 32 * 32 + 2 * 32 * 48)
    skipped = 3 * 3 * ((1 - rows) * token + (1 - rows**2) * 4 * TIME * 32)
    router = 3 * method_of(build(config)).decider.flops
    assert training_flops(dense) - training_flops(config) == pytest.approx(skipped - router)


class Gathers(TorchDispatchMode):
    """Counts how often states `[n, d]` are gathered from a batch or scattered back."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.put = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        self.taken += name == "index_select" and out.shape[-1] == MODEL.d_model
        self.put += name in ("index_copy", "index_copy_", "index_put", "index_put_")
        return out


@torch.no_grad()
@pytest.mark.parametrize(("carry", "moves"), [("none", (1, 1)), ("last", (2, 0))])
def test_sparse_takes_rows_out_once_and_gives_back_once(carry, moves):
    """With `carry`, each token gathers its update, instead of updates being scattered and then carried over."""
    model, ids = span(carry=carry).eval(), tokens()
    with Gathers() as seen:
        model(ids, execution="sparse", decisions=given(some(ids)))
    assert (seen.taken, seen.put) == moves


@each_shape
@torch.no_grad()
def test_rows_are_as_wide_as_the_packed_sequence_and_both_conventions_are_told(shape):
    model, ids = span(shape).eval(), tokens()
    active = some(ids)
    out = []
    counted = count_flops(lambda: out.append(model(ids, execution="sparse", decisions=given(active))))
    totals = out[0].trace.totals()
    assert totals.flops == counted
    n = active.sum(1)
    assert totals.narrower_rows == 3 * 4 * 32 * int((n * (TIME - n)).sum())
    assert totals.flops_full_rows == counted + totals.narrower_rows


@each_shape
@torch.no_grad()
def test_where_kernels_serve_nothing_is_packed_and_the_result_is_the_same(shape, monkeypatch):
    """Their rows are listed on the device; here library calls stand in for kernels."""
    model, ids = span(shape).eval(), tokens()
    for decisions in (given(some(ids)), None):
        packed = model(ids, execution="sparse", decisions=decisions)
        with monkeypatch.context() as patch:
            patch.setattr(Block, "skips_by_kernel", lambda *_: True)
            listed = model(ids, execution="sparse", decisions=decisions)
        assert close(listed.logits, packed.logits)
        assert torch.equal(listed.trace.work, packed.trace.work)
        assert listed.trace.totals().flops == packed.trace.totals().flops_full_rows, "its rows are as wide as ever"


# --- a width of its own -----------------------------------------------------------------------------------------------


def test_without_a_width_there_is_nothing_new_in_the_model():
    dense, model = build(RunConfig(model=MODEL, method=DenseConfig())), span()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    router = {f"method.decider.router.{layer}.{part}" for layer in ("hidden", "logit") for part in ("weight", "bias")}
    assert shapes.keys() - dense.state_dict().keys() == {"method.threshold", *router}
    assert all(shapes[name] == value.shape for name, value in dense.state_dict().items())


@pytest.mark.parametrize(("width", "hidden"), [(64, 96), (40, 64), (8, 16), (2, 16), (32, 48)])
def test_blocks_of_another_width_have_the_same_heads(width, hidden):
    """The hidden units scale with the width, rounded to whole tiles of 16."""
    model = span(MODERN, width=width)
    shapes = {name: tuple(value.shape) for name, value in method_of(model).named_parameters()}
    assert shapes["enter.weight"] == (width, 32)
    assert shapes["leave.weight"] == (32, width)
    assert [f"{name}.bias" in shapes for name in ("enter", "leave")] == [False, False]
    for n, block in enumerate(method_of(model).blocks):
        d, d_ff = (width, hidden) if n in method_of(model).span else (32, 48)
        assert shapes[f"blocks.{n}.norm_attention.weight"] == (d,)
        assert shapes[f"blocks.{n}.attention.qkv.weight"] == ((4 + 2 + 2) * 8, d)
        assert shapes[f"blocks.{n}.attention.out.weight"] == (d, 4 * 8)
        assert shapes[f"blocks.{n}.ffn.gate_up.weight"] == (2 * d_ff, d)
        assert shapes[f"blocks.{n}.ffn.down.weight"] == (d, d_ff)
        assert (block.attention.n_head, block.attention.kv_heads, block.attention.width) == (4, 2, 8)


def test_what_leaves_the_span_begins_as_a_residual_projection():
    model = build(RunConfig(model=MODEL, method=SpanConfig(width=1024)))
    leave = method_of(model).leave
    assert leave is not None
    assert leave.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 5), rel=0.02)


@each_shape
@each_execution
@torch.no_grad()
def test_a_wider_span_by_hand(shape, execution):
    """The plain blocks on tokens 1, 4 and 9 after `enter`; `leave` maps their updates, not their whole states."""
    model, ids, places = span(shape, width=64, decide="dice", carry="none").eval(), tokens(1), [1, 4, 9]
    method, active = method_of(model), torch.zeros(1, TIME, dtype=torch.bool)
    active[0, places] = True
    (embedded, ctx), maps = model.entering(ids, "hard"), dict(method.named_parameters())
    enter, leave = maps["enter.weight"], maps["leave.weight"]
    h = method.blocks[0](embedded, ctx)
    inner = rows = h[:, places] @ enter.T
    rotation = ctx.rotation and (ctx.rotation[0][:, places], ctx.rotation[1][:, places])
    for n in method.span:
        rows = method.blocks[n](rows, replace(ctx, positions=None, rotation=rotation))
    h[:, places] += (rows - inner) @ leave.T
    expected = model.readout(method.blocks[-1](h, ctx))
    assert close(model(ids, execution=execution, decisions=given(active)).logits, expected)
    nobody = model(ids, execution=execution, decisions=given(torch.zeros_like(active))).logits
    assert torch.equal(nobody, dense_like(model, skip=method.span)(ids).logits)


def test_only_active_tokens_pay_for_the_width():
    """By hand, with 16 keys: queries, keys and values, output, row, feed-forward, and both maps in the first block."""
    model, ids = span(width=64).eval(), tokens()
    plain, first, second, third, _ = method_of(model).sites(TIME)
    block = 2 * 64 * (3 * 32) + 2 * 32 * 64 + 4 * 32 * TIME + 2 * 2 * 64 * 96
    assert (second.active, third.active) == (block, block)
    assert first.active == block + 2 * 2 * 32 * 64
    assert {site.always for site in (first, second, third)} == {0}
    assert plain.active + plain.always == 2 * 32 * (3 * 32) + 2 * 32 * 32 + 4 * 32 * TIME + 2 * 2 * 32 * 48
    active = some(ids)
    nobody, few = (
        count_flops(lambda chosen=chosen: model(ids, execution="sparse", decisions=given(chosen)))
        for chosen in (torch.zeros_like(active), active)
    )
    n = active.sum(1)
    fewer = 3 * 4 * 32 * int((n * (TIME - n)).sum())
    assert few - nobody == int(n.sum()) * (3 * block + 2 * 2 * 32 * 64) - fewer


@pytest.mark.parametrize(
    "knobs",
    [
        {"decide": "gain", "carry": "none", "draft": 0.5},
        {"decide": "gain", "gain": "kl", "carry": "none", "bypass": True},
        {"decide": "boundary", "carry": "smooth", "anneal": 0.5},
    ],
    ids=str,
)
def test_every_way_to_train_goes_through_the_width(knobs):
    model, ids = span(MODERN, width=48, **knobs).train(), tokens()
    out = model(ids[:, :-1], targets=ids[:, 1:])
    (sum(out.losses.values()) + out.logits.square().mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        calibrate_on(model, ids, 0.4)
        hard, sparse = (model(ids, execution=execution).logits for execution in ("hard", "sparse"))
    assert close(sparse, hard)


@torch.no_grad()
def test_where_kernels_serve_a_span_of_another_width_is_packed(monkeypatch):
    """Here library calls stand in for kernels that would take all tokens of a small block."""
    model, ids = span(width=64).eval(), tokens()
    expected = model(ids, execution="sparse")
    for name in ("skips_by_kernel", "launch_bound"):
        monkeypatch.setattr(Block, name, lambda *_: True)
    found = model(ids, execution="sparse")
    assert close(found.logits, expected.logits)
    assert found.trace.totals().flops == expected.trace.totals().flops
    shape = replace(MODEL, d_model=64)
    assert not build(RunConfig(model=shape, method=SpanConfig(width=64))).bfloat16().can_be_captured
    assert build(RunConfig(model=shape, method=SpanConfig())).bfloat16().can_be_captured


# --- the cache --------------------------------------------------------------------------------------------------------


@each_shape
@torch.no_grad()
def test_the_span_has_a_length_of_its_own_for_every_sequence(shape):
    model, ids = span(shape).eval(), tokens(3)
    active = some(ids)
    for first in ("hard", "sparse"):  # one execution may follow the other
        kept = KVCache(shape, 3, TIME, layers=5, like=model.norm.weight)
        logits = []
        for execution, columns in ((first, slice(0, 9)), ("sparse", slice(9, 10)), ("hard", slice(10, TIME))):
            decisions = given(active)[..., columns]
            logits.append(model(ids[:, columns], execution=execution, decisions=decisions, cache=kept).logits)
        assert close(torch.cat(logits, 1), model(ids, execution="hard", decisions=given(active)).logits)
        assert kept.states["span length"].tolist() == active.sum(1).tolist()
        assert kept.lengths.tolist() == [TIME] * 3
        for layer, seen in enumerate(kept.valid[:, :, :TIME]):
            lengths = active.sum(1) if layer in method_of(model).span else torch.full((3,), TIME)
            assert torch.equal(seen, torch.arange(TIME) < lengths[:, None]), "the first columns, and no others"


@torch.no_grad()
def test_a_threshold_is_not_rounded_with_the_weights():
    model = span().eval()
    calibrate_on(model, tokens(16), 0.4)
    before = method_of(model).thresholds
    assert len(before) == 3, "one for each site, and all the same"
    assert len(set(before)) == 1
    assert model.bfloat16().norm.weight.dtype == torch.bfloat16
    assert method_of(model).thresholds == before
    method_of(model).set_thresholds([0.5, 0.5, 0.5])
    assert method_of(model).thresholds == [0.5] * 3


# --- the bypass -------------------------------------------------------------------------------------------------------


@each_shape
@each_execution
def test_a_token_that_skips_takes_the_linear_map_instead(shape, execution):
    model, ids = span(shape, decide="gain", carry="none", keys="all", bypass=True).eval(), tokens()
    method = method_of(model)
    assert method.bypass is not None
    with torch.no_grad():
        states, ctx = model.entering(ids, "hard")
        hidden = method.blocks[0](states, ctx)
        mean = hidden.mean(-1, keepdim=True) if shape.norm == "layer" else 0.0
        x = (hidden - mean) / ((hidden - mean).square().mean(-1, keepdim=True) + shape.norm_eps).sqrt()
        mapped = hidden + hidden.square().mean(-1, keepdim=True).sqrt() * (x @ method.bypass.map.weight.T)
        expected = model.norm(method.blocks[4](mapped, ctx)) @ head_of(model).T
        nobody = torch.zeros(3, *ids.shape, dtype=torch.bool)
        assert close(model(ids, execution=execution, decisions=nobody).logits, expected)
        everyone = model(ids, execution=execution, decisions=~nobody).logits
        assert torch.equal(everyone, dense_like(model)(ids).logits), "those who take the span do not see it"


def head_of(model: LanguageModel) -> Tensor:
    return model.embedding.weight if model.config.tie_head else model.head.weight


def test_a_bypass_is_fitted_by_least_squares():
    rng = torch.Generator().manual_seed(0)
    wanted, x = torch.randn(32, 32, generator=rng), torch.randn(2000, 32, generator=rng)
    bypass = Bypass(MODEL)
    bypass.fit((part, part @ wanted.T) for part in x.split(500))
    assert float((bypass.map.weight.detach() - wanted).abs().max()) < 0.01, "but for the ridge"
    model, ids = span(decide="gain", carry="none", bypass=True).eval(), tokens(64)
    states, ctx = model.entering(ids, "hard")
    everyone = torch.ones(3, *ids.shape, dtype=torch.bool)

    def distance() -> float:
        with torch.no_grad():
            full, none = (model(ids, execution="hard", decisions=d).logits for d in (everyone, ~everyone))
        return float((full - none).square().mean())

    before = distance()
    method_of(model).fit([states], ctx)
    assert distance() < before


def test_where_a_bypass_replaces_the_span_its_blocks_are_not_trained():
    model, ids = span(decide="dice", budget=0.0, carry="none", bypass=True).train(), tokens()
    out = model(ids, targets=ids)
    assert float(out.trace.work[1:4].sum()) == 0
    out.logits.square().mean().backward()
    without = {name.split(".")[2] for name, p in model.named_parameters() if p.grad is None}
    assert without == {"1", "2", "3"}
    model.eval()
    assert close(model(ids, execution="sparse").logits.detach(), out.logits.detach())


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"carry": "last"}, "method.carry is 'last'; expected none, since a bypass is itself an update"),
        ({"carry": "none", "budget": 0.0}, "method.decide is 'score'; expected dice"),
    ],
)
def test_a_bypass_that_makes_no_sense(knobs, said):
    with pytest.raises(UserError, match=said):
        SpanConfig(bypass=True, **knobs)
