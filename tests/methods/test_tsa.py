"""Each equation in the TSA paper, by hand on a tiny model; and that sparse execution skips what it reports.

If a test recomputes what the model computes, with the same float32 sums, results may differ by rounding: 6e-8 per term
and some dozens of terms, so 1e-5 relative. If nothing is computed, equality is exact.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokendepth.config import DenseConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.layers.routers import Router
from tokendepth.methods import build
from tokendepth.methods.tsa import TSA
from tokendepth.model import Context, LanguageModel, MethodOutput, Output

LAYERS, TIME = 3, 16
# No two widths are equal, so that a layer can be recognised by the shape of its weight.
MODEL = ModelConfig(d_model=32, n_layer=LAYERS, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)


def tsa(**knobs) -> LanguageModel:
    """With residual updates as large as the state, so that gates matter."""
    model = build(RunConfig(model=MODEL, method=TSAConfig(**knobs))).eval()
    with torch.no_grad():
        for block in model.method.blocks:
            for matrix in (block.attention.out.weight, block.ffn.down.weight):
                matrix.mul_(0.2 / matrix.std())
    return model


def always(model: LanguageModel, p: float) -> LanguageModel:
    """The same model with routers that always return `p` (0, 1 or in between)."""
    with torch.no_grad():
        for router in model.method.routers():
            router.logit.weight.zero_()
            router.logit.bias.fill_(math.log(p / (1 - p)) if 0 < p < 1 else math.copysign(200.0, p - 0.5))
    return model


def states(batch: int = 2, time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randn(batch, time, MODEL.d_model, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int = 2, time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randint(MODEL.vocab_size, (batch, time), generator=torch.Generator().manual_seed(seed))


def some(fraction: float = 0.5, batch: int = 2, time: int = TIME) -> Tensor:
    return torch.rand(LAYERS - 1, batch, time, generator=torch.Generator().manual_seed(1)) < fraction


@torch.no_grad()
def run(model: LanguageModel, ids: Tensor, execution: str, decisions: Tensor | None = None) -> Output:
    return model(ids, execution=execution, decisions=decisions)


@torch.no_grad()
def through(model: LanguageModel, hidden: Tensor, execution: str, decisions: Tensor | None = None) -> MethodOutput:
    return model.method(hidden, Context(execution, decisions=decisions))


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


# --- eq. 1: the stem, then routers and gated blocks in turn -----------------------------------------------------------


@torch.no_grad()
def test_eq_1_3_and_4_by_hand():
    """One p for a block's attention and its feed-forward, from the state before the block."""
    model, ctx = tsa(), Context("soft")
    h = states()
    expected = model.method.blocks[0](h, ctx)
    keeps = [torch.ones(2, TIME)]
    for block in model.method.blocks[1:]:
        p = torch.sigmoid(block.router(expected))
        expected = expected + (1 - p)[..., None] * block.attention(block.norm_attention(expected), ctx)
        expected = expected + (1 - p)[..., None] * block.ffn(block.norm_ffn(expected))
        keeps.append(1 - p)
    output = through(model, h, "soft")
    assert close(output.hidden, expected)
    assert close(output.trace.work, torch.stack(keeps))


@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_the_stem_is_never_gated(execution):
    """With all decisions False, only the stem remains, bit for bit, and it is all the work."""
    model, h = tsa(), states()
    output = through(model, h, execution, torch.zeros(LAYERS - 1, 2, TIME, dtype=torch.bool))
    with torch.no_grad():
        stem = model.method.blocks[0](h, Context(execution))
    assert torch.equal(output.hidden, stem)
    assert not torch.equal(stem, h)
    assert (output.trace.work[0] == 1).all()
    assert (output.trace.work[1:] == 0).all()


def test_the_stem_has_no_router_and_every_other_block_its_own():
    method = tsa().method
    assert isinstance(method, TSA)
    assert not hasattr(method.blocks[0], "router")
    assert [block.router for block in method.blocks[1:]] == method.routers()
    assert len({id(router) for router in method.routers()}) == LAYERS - 1
    assert [site.routed for site in method.sites(keys=TIME)] == [False, True, True]


def test_a_single_layer_has_nothing_to_route():
    model = build(RunConfig(model=replace(MODEL, n_layer=1), method=TSAConfig())).eval()
    out = run(model, tokens(), "sparse")
    assert out.losses == {}
    assert out.trace.totals().active_fraction == 1


# --- eq. 2: the router ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d_model", "hidden"), [(8, 16), (32, 16), (64, 16), (68, 17), (256, 64)])
def test_a_routers_width_is_a_quarter_and_at_least_16(d_model, hidden):
    router = Router(d_model)
    assert router.hidden.weight.shape == (hidden, d_model)
    assert router.logit.weight.shape == (1, hidden)
    assert router.flops == 2 * (d_model * hidden + hidden)


@torch.no_grad()
def test_eq_2_by_hand():
    router, h = Router(32), states().numpy()
    w1, b1 = router.hidden.weight.numpy(), router.hidden.bias.numpy()
    w2, b2 = router.logit.weight.numpy(), router.logit.bias.numpy()
    logit = np.maximum(h @ w1.T + b1, 0) @ w2[0] + b2
    p = 1 / (1 + np.exp(-logit))
    assert close(router(torch.from_numpy(h)), torch.from_numpy(logit))
    assert close(torch.sigmoid(router(torch.from_numpy(h))), torch.from_numpy(p))


def test_at_first_a_token_halts_with_probability_sigmoid_of_minus_one():
    """0.27 from the bias; the weights add little while the states are small."""
    trace = run(build(RunConfig(model=MODEL, method=TSAConfig())).eval(), tokens(), "soft").trace
    assert trace.totals().active_fraction == pytest.approx(1 - 1 / (1 + math.e), abs=0.05)
    router = Router(32)
    with torch.no_grad():
        router.logit.weight.zero_()
    assert torch.sigmoid(router(states())).unique().tolist() == pytest.approx([1 / (1 + math.e)])


@torch.no_grad()
def test_under_autocast_the_gate_is_still_float32():
    """Products may round inputs, weights, hidden units and logits to bfloat16, 2^-9 each; the gate is not rounded."""
    router, h = Router(32), states()
    exact = router(h)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router(h)
    hidden = h.abs() @ router.hidden.weight.abs().T + router.hidden.bias.abs()
    terms = hidden @ router.logit.weight[0].abs() + router.logit.bias.abs()
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 5 * 2**-9 * terms).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert run(tsa(), tokens(), "soft").trace.work.dtype == torch.float32


# --- eq. 3 and 4 at the extremes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["soft", "hard", "sparse"])
def test_halting_for_sure_leaves_the_state_unchanged(execution):
    model, h = always(tsa(), p=1), states()
    with torch.no_grad():
        stem = model.method.blocks[0](h, Context())
    output = through(model, h, execution)
    assert torch.equal(output.hidden, stem)
    assert (output.trace.work[1:] == 0).all()


@pytest.mark.parametrize("execution", ["soft", "hard", "sparse"])
def test_never_halting_equals_the_dense_model(execution):
    model, ids = always(tsa(), p=0), tokens()
    dense = build(RunConfig(model=MODEL, method=DenseConfig())).eval()
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if ".router." not in k})
    out = run(model, ids, execution)
    assert (out.trace.work == 1).all()
    assert close(out.logits, run(dense, ids, execution).logits)


def test_hard_is_soft_where_the_gate_is_binary():
    """Per block: a gate of 0 and 1 in soft execution equals the decision in hard execution."""
    model, h, active = tsa(), states(), some()[0]
    block = model.method.blocks[1]
    with torch.no_grad():
        assert torch.equal(block(h, Context(), gate=active), block(h, Context(), gate=active.float()))
        assert torch.equal(block(h, Context(), gate=active)[~active], h[~active])
        assert close(block(h, Context(), gate=active)[active], block(h, Context())[active])


# --- eq. 5, 6, 7 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth_penalty", [0.0, 0.001, 0.5])
def test_eq_5_the_depth_loss(depth_penalty):
    model, ids = tsa(depth_penalty=depth_penalty), tokens()
    out = run(model, ids, "soft")
    keeps = [float(out.trace.work[layer].mean()) for layer in range(1, LAYERS)]
    assert out.losses.keys() == {"depth"}
    assert float(out.losses["depth"]) == pytest.approx(depth_penalty * sum(keeps) / (LAYERS - 1), rel=1e-5)


def test_eq_5_on_numbers_made_for_it():
    model = tsa(depth_penalty=0.1)
    with torch.no_grad():
        for router, p in zip(model.method.routers(), (0.2, 0.6), strict=True):
            router.logit.weight.zero_()
            router.logit.bias.fill_(math.log(p / (1 - p)))
    # Active fractions 0.8 and 0.4: their mean is 0.6.
    assert float(run(model, tokens(), "soft").losses["depth"]) == pytest.approx(0.06, rel=1e-5)


def test_the_depth_loss_pushes_towards_halting():
    model = tsa(depth_penalty=1.0)
    model(tokens()).losses["depth"].backward()
    for router in model.method.routers():
        assert router.logit.bias.grad.item() < 0, "a step against it raises the halting logit"


def test_eq_6_and_7_alpha_and_tlops():
    model = tsa()
    decisions = torch.zeros(2, 1, 4, dtype=torch.bool)
    decisions[0, 0, :3] = True  # 3 of 4 at the first router, 1 of 4 at the second
    decisions[1, 0, 1] = True
    for execution in ("hard", "sparse"):
        totals = run(model, tokens(1, 4), execution, decisions).trace.totals()
        assert totals.per_site == [1, 0.75, 0.25]
        assert totals.active_fraction == 0.5
        assert totals.tlops == 8
        assert totals.tlops_saved == pytest.approx(1 - (1 + 2 * 0.5) / 3)
    soft = always(tsa(), p=0.25)
    assert run(soft, tokens(), "soft").trace.totals().active_fraction == pytest.approx(0.75, rel=1e-5)


# --- the threshold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.9])
def test_a_token_is_skipped_when_p_exceeds_the_threshold(threshold):
    for p, active in ((threshold - 0.01, 1), (threshold + 0.01, 0)):
        work = run(always(tsa(threshold=threshold), p), tokens(), "hard").trace.work
        assert (work[1:] == active).all()


def test_at_the_threshold_itself_a_token_is_kept():
    """p > 0.5 skips, p = 0.5 does not."""
    work = run(always(tsa(threshold=0.5), p=0.5), tokens(), "hard").trace.work
    assert (work == 1).all()


@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_threshold_0_skips_all_and_threshold_1_none(execution):
    """For p strictly between 0 and 1, even if float32 rounds it to either."""
    for p in (1e-30, 0.5, 1 - 1e-16):
        assert (run(always(tsa(threshold=0.0), p), tokens(), execution).trace.work[1:] == 0).all()
        assert (run(always(tsa(threshold=1.0), p), tokens(), execution).trace.work[1:] == 1).all()
    for p in (0.0, 1.0):  # logits of -200 and 200: p rounds to 0 or 1, but is between them
        assert (run(always(tsa(threshold=0.0), p), tokens(), execution).trace.work[1:] == 0).all()
        assert (run(always(tsa(threshold=1.0), p), tokens(), execution).trace.work[1:] == 1).all()


def test_the_decision_is_taken_on_each_token():
    model, ids = tsa(), tokens(8)
    with torch.no_grad():
        for router in model.method.routers():
            router.logit.weight.mul_(50)
            router.logit.bias.zero_()
    soft, hard = run(model, ids, "soft").trace.work[1], run(model, ids, "hard").trace.work[1]
    # The first router reads the stem's output, which is the same in both.
    assert torch.equal(hard, (1 - soft <= 0.5).float())
    assert 0 < hard.mean() < 1


def test_soft_does_not_take_decisions():
    model, ids = tsa(), tokens()
    assert torch.equal(run(model, ids, "soft", some()).logits, run(model, ids, "soft").logits)


# --- sparse execution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", ["block", "ffn"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_sparse_equals_hard_on_the_same_decisions(skip, fraction):
    model, ids, decisions = tsa(skip=skip), tokens(), some(fraction)
    hard, sparse = (run(model, ids, execution, decisions) for execution in ("hard", "sparse"))
    assert close(sparse.logits, hard.logits)
    assert torch.equal(sparse.trace.work, hard.trace.work)


def test_what_is_skipped_does_not_change_what_is_computed():
    """`block` and `ffn` skip different parts of the same computation."""
    ids, decisions = tokens(), some()
    block, ffn = (run(tsa(skip=skip), ids, "sparse", decisions) for skip in ("block", "ffn"))
    assert close(block.logits, ffn.logits)


class MultipliedRows(TorchFunctionMode):
    """Counts the rows multiplied in the feed-forward, output projection and routers of each gated block."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.ffn, self.out, self.router = [], [], []
        self.seen = {}
        for block in model.method.blocks[1:]:
            weights = (block.ffn.up.weight, block.attention.out.weight, block.router.hidden.weight)
            self.seen |= {id(w): rows for w, rows in zip(weights, (self.ffn, self.out, self.router), strict=True)}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and id(args[1]) in self.seen:
            self.seen[id(args[1])].append(args[0][..., 0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_sparse_really_skips(fraction):
    ids, decisions = tokens(), some(fraction)
    active = decisions.sum((1, 2)).tolist()
    every = [ids.numel()] * (LAYERS - 1)
    expected = {"block": (active, active), "ffn": (active, every)}
    for skip, (ffn, out) in expected.items():
        model = tsa(skip=skip)
        with MultipliedRows(model) as rows:
            run(model, ids, "sparse", decisions)
        assert (rows.ffn, rows.out, rows.router) == (ffn, out, every)
        with MultipliedRows(model) as rows:
            run(model, ids, "hard", decisions)
        assert rows.ffn == every, "hard computes all and throws away"


def test_sparse_asks_no_query_of_a_skipped_token(monkeypatch):
    """Checked in the products themselves: number of input rows, by output width."""
    model, ids, decisions = tsa(), tokens(), some(0.3)
    shapes, linear = [], F.linear

    def watched(x: Tensor, weight: Tensor, *rest) -> Tensor:
        shapes.append((x[..., 0].numel(), weight.shape[0]))
        return linear(x, weight, *rest)

    monkeypatch.setattr(F, "linear", watched)
    run(model, ids, "sparse", decisions)

    def rows(width: int) -> list[int]:
        return [n for n, out in shapes if out == width]

    d, every, (first, second) = MODEL.d_model, ids.numel(), decisions.sum((1, 2)).tolist()
    assert 0 < first < every
    assert 0 < second < every
    assert rows(3 * d) == [every], "queries, keys and values in one: the stem"
    assert rows(2 * d) == [every] * 2, "keys and values of every token"
    assert rows(d) == [every] * 2 + [first] * 3 + [second] * 3, "stem: out, down; then query, out, down of active rows"
    assert rows(MODEL.d_ff) == [every, first, second]


@pytest.mark.parametrize("execution", ["hard", "sparse"])
@pytest.mark.parametrize("skip", ["block", "ffn"])
def test_a_skipped_token_keeps_its_key_and_value(execution, skip):
    """Its state is unchanged, and a later active token still attends to it, in every gated block."""
    model, h = tsa(skip=skip), states(1)
    block, at, later = model.method.blocks[1], 4, 9
    active = torch.ones(1, TIME, dtype=torch.bool)
    active[0, at] = False
    changed = h.clone()
    changed[0, at] = states(1, seed=1)[0, at]  # not a shift of all features, which the norm would undo

    @torch.no_grad()
    def after(hidden: Tensor) -> Tensor:
        threshold = torch.where(active, -math.inf, math.inf)
        return model.method._execute(block, hidden.clone(), Context(execution), threshold)[0]

    assert torch.equal(after(h)[0, at], h[0, at])
    assert torch.equal(after(changed)[0, at], changed[0, at])
    difference = (after(changed) - after(h))[0, later].abs().max()
    assert difference > 1e-3, "far above rounding: the later token has seen the skipped one"


def test_a_skipped_token_is_remembered_by_the_models_later_tokens():
    model, ids = tsa(), tokens(1)
    decisions = torch.ones(LAYERS - 1, 1, TIME, dtype=torch.bool)
    decisions[:, 0, 4] = False
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % MODEL.vocab_size
    before, after = (run(model, x, "sparse", decisions).logits[0, 5:] for x in (ids, other))
    assert (after - before).abs().max() > 1e-4 * before.abs().max()


def test_what_a_site_costs_by_hand():
    d, ff, keys = MODEL.d_model, MODEL.d_ff, 10
    key_value, attention, network = 4 * d * d, 4 * d * d + 4 * keys * d, 4 * d * ff
    router = 2 * (d * 16 + 16)
    block, ffn = (tsa(skip=skip).method.sites(keys) for skip in ("block", "ffn"))
    for stem in (block[0], ffn[0]):
        assert (stem.always + stem.active, stem.router) == (key_value + attention + network, 0)
    for site in block[1:]:
        assert (site.always, site.active, site.router) == (key_value, attention + network, router)
    for site in ffn[1:]:
        assert (site.always, site.active, site.router) == (key_value + attention, network, router)


@torch.no_grad()
@pytest.mark.parametrize("execution", ["hard", "sparse"])
def test_a_router_is_asked_where_decisions_are_given_too(execution):
    """Otherwise torch.compile would drop it, and the timed model would not be the one served."""
    model = tsa()
    model.method.routers()[0].logit.bias.fill_(math.nan)
    ids, everyone = torch.zeros(1, TIME, dtype=torch.long), torch.ones(LAYERS - 1, 1, TIME, dtype=torch.bool)
    work = model(ids, execution=execution, decisions=everyone).trace.work
    assert work.mean((1, 2)).tolist() == [1.0, 0.0, 1.0], "what is not a number is above no threshold"
