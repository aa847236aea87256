"""Span routing: one decision, one gather and one scatter for several blocks, and what the others get of it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokendepth.cache import KVCache
from tokendepth.config import DenseConfig, ModelConfig, RunConfig, SpanConfig
from tokendepth.context import Context
from tokendepth.measure.calibrate import calibrate_on
from tokendepth.measure.flops import count_flops, training_flops
from tokendepth.methods import build
from tokendepth.methods.span import ROOM, Span, carry_on
from tokendepth.model import Block, LanguageModel

TIME, VOCABULARY = 16, 11
MODEL = ModelConfig(d_model=32, n_layer=5, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=VOCABULARY)
MODERN = replace(
    MODEL, norm="rms", positions="rotary", n_kv_head=2, ffn="swiglu", ffn_bias=False, qk_norm=True, tie_head=False
)

each_shape = pytest.mark.parametrize("shape", [MODEL, MODERN], ids=["classic", "modern"])
each_execution = pytest.mark.parametrize("execution", ["hard", "sparse"])


def span(shape: ModelConfig = MODEL, **knobs) -> LanguageModel:
    """1 + 3 + 1 blocks, with a router that tells tokens apart and updates as large as the state."""
    model = build(RunConfig(model=shape, method=SpanConfig(**knobs)))
    with torch.no_grad():
        for matrix in (p for p in model.method.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


def method_of(model: LanguageModel) -> Span:
    assert isinstance(model.method, Span)
    return model.method


def tokens(batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, TIME), generator=torch.Generator().manual_seed(seed))


def given(active: Tensor) -> Tensor:
    """The decision of `[batch, time]` for each of the three blocks."""
    return active.expand(3, *active.shape)


def some(ids: Tensor) -> Tensor:
    return torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.4


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def dense_like(model: LanguageModel, *, skip: range = range(0)) -> LanguageModel:
    """The dense model of the same weights, without the blocks `skip`."""
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
@pytest.mark.parametrize("carry", ["none", "last"])
@torch.no_grad()
def test_a_text_of_which_no_token_takes_the_span_is_that_of_the_model_without_it(shape, execution, carry):
    model, ids = span(shape, carry=carry).eval(), tokens()
    out = model(ids, execution=execution, decisions=given(torch.zeros_like(ids, dtype=torch.bool)))
    assert torch.equal(out.logits, dense_like(model, skip=method_of(model).span)(ids).logits)


@each_execution
@torch.no_grad()
def test_active_tokens_are_a_shorter_sequence_at_their_true_positions(execution):
    """By hand: the plain blocks on tokens 1, 4 and 9 of a text, embedded where they stand, as if there were no others.

    And each weighted update is that of the tokens up to the next active one.
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
    score = -method.router(F.layer_norm(h, (32,)))
    updates = torch.sigmoid(score[:, places, None]) * (rows - h[:, places])
    expected = h.clone()
    for t in range(TIME):
        before = [n for n, place in enumerate(places) if place <= t]
        expected[:, t] += updates[:, before[-1]] if before else 0
    expected = model.readout(method.blocks[-1](expected, ctx))
    assert close(model(ids, execution=execution, decisions=given(active)).logits, expected)


@torch.no_grad()
def test_rotary_positions_are_the_true_ones():
    """The same two active tokens, one place farther apart, attend otherwise."""
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


def test_carried_updates_by_hand():
    """c_t = fresh_t + keep_t c_{t-1}."""
    fresh = torch.tensor([[[1.0], [0.0], [4.0], [0.0], [8.0]]])
    keep = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.25]])
    assert carry_on(fresh, keep).flatten().tolist() == [1, 1, 4, 4, 9]
    assert carry_on(fresh, keep, torch.tensor([[2.0]])).flatten().tolist() == [3, 3, 4, 4, 9]
    assert carry_on(fresh[:, :1], keep[:, :1], torch.tensor([[2.0]])).flatten().tolist() == [3]


@pytest.mark.parametrize("time", [1, 2, 7, 8, 33])
def test_carried_updates_are_those_of_a_loop(time):
    rng = torch.Generator().manual_seed(time)
    fresh, keep = torch.randn(2, time, 3, generator=rng).double(), torch.rand(2, time, generator=rng).double()
    last, expected = torch.randn(2, 3, generator=rng).double(), []
    carried = last
    for t in range(time):
        carried = fresh[:, t] + keep[:, t, None] * carried
        expected.append(carried)
    torch.testing.assert_close(carry_on(fresh, keep, last), torch.stack(expected, 1))


# --- who is active ----------------------------------------------------------------------------------------------------


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
    method = method_of(span(budget=0.25))  # room for 6 of 16
    scores = torch.arange(32.0).view(2, 16).flip(1)
    chosen = method._chosen(scores, torch.tensor(15.0), Context())
    assert chosen.as_mask(scores).sum(1).tolist() == [0, 6], "sixteen are above the threshold"
    assert chosen.places[1].tolist() == [0, 1, 2, 3, 4, 5]
    mixed = torch.tensor([[1.0, 9.0, 2.0, 8.0, 3.0, 7.0, *[0.0] * 10]])
    chosen = method._chosen(mixed, torch.tensor(2.5), Context())
    assert chosen.there is not None
    assert chosen.places[0, chosen.there[0]].tolist() == [1, 3, 4, 5], "first, and in order"
    assert chosen.there[0].tolist() == [True] * 4 + [False] * 2


# --- skipping ---------------------------------------------------------------------------------------------------------


def test_training_that_packs_is_training_that_masks():
    """Losses and gradients, against the reference execution with the decisions that training took."""
    ids = tokens(6)

    def gradients(masked: bool) -> tuple[float, list[Tensor]]:
        model = span(budget=0.4).train()
        taken = model(ids[:, :-1]).trace.work[1:4] > 0.5
        out = model.eval()(ids[:, :-1], execution="hard", decisions=taken) if masked else model(ids[:, :-1])
        loss = F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))

    (loss, found), (masked_loss, expected) = gradients(masked=False), gradients(masked=True)
    assert loss == pytest.approx(masked_loss, rel=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_training_flops_are_those_of_the_room():
    config = RunConfig(model=MODEL, method=SpanConfig(budget=0.25))
    dense = RunConfig(model=MODEL, method=DenseConfig())
    rows = 6 / 16  # room for 6 of 16 tokens, in three blocks, forward and backward
    token = 2 * (4 * 32 * 32 + 2 * 32 * 48)
    skipped = 3 * 3 * ((1 - rows) * token + (1 - rows**2) * 4 * TIME * 32)
    router = 3 * method_of(build(config)).router.flops
    assert training_flops(dense) - training_flops(config) == pytest.approx(skipped - router)


class Gathers(TorchDispatchMode):
    """How often states `[n, d]` are taken out of a batch's, or put back."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.put = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        self.taken += name == "index_select" and out.shape[-1] == MODEL.d_model
        self.put += name in ("index_copy", "index_copy_", "index_put", "index_put_")
        return out


@torch.no_grad()
def test_sparse_gathers_once_and_scatters_once():
    model, ids = span().eval(), tokens()
    with Gathers() as seen:
        model(ids, execution="sparse", decisions=given(some(ids)))
    assert (seen.taken, seen.put) == (1, 1)


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
    """Their rows are listed on the device; here the library stands in for them."""
    model, ids = span(shape).eval(), tokens()
    for decisions in (given(some(ids)), None):
        packed = model(ids, execution="sparse", decisions=decisions)
        with monkeypatch.context() as patch:
            patch.setattr(Block, "skips_by_kernel", lambda *_: True)
            listed = model(ids, execution="sparse", decisions=decisions)
        assert close(listed.logits, packed.logits)
        assert torch.equal(listed.trace.work, packed.trace.work)
        assert listed.trace.totals().flops == packed.trace.totals().flops_full_rows, "its rows are as wide as ever"


# --- the cache --------------------------------------------------------------------------------------------------------


@each_shape
@torch.no_grad()
def test_the_span_has_a_length_of_its_own_for_every_sequence(shape):
    model, ids = span(shape).eval(), tokens(3)
    active = some(ids)
    for first in ("hard", "sparse"):  # an execution may follow the other
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
