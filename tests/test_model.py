"""The model matches the TSA paper exactly (parameters, initialisation), and user errors are reported."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.cache import KVCache
from tokendepth.config import (
    BudgetConfig,
    DenseConfig,
    EarlyExitConfig,
    MethodConfig,
    MoDConfig,
    ModelConfig,
    RunConfig,
    SwitchConfig,
    TSAConfig,
)
from tokendepth.errors import UserError
from tokendepth.layers.attention import Attention, causal_mask
from tokendepth.layers.ffn import FeedForward
from tokendepth.methods import build
from tokendepth.model import Context, LanguageModel
from tokendepth.recipes import RECIPES
from tokendepth.trace import EXECUTIONS

TINY = ModelConfig(d_model=32, n_layer=3, n_head=4, d_ff=64, context=16, dropout=0.0, vocab_size=11)

SHAPES = {  # recipe: vocabulary, parameters
    "shakespeare.dense": (65, 4_782_336),
    "shakespeare.tsa": (65, 4_864_901),
    "enwik8.dense": (6064, 6_350_848),
    "enwik8.tsa": (6064, 6_433_413),
    "synthetic.copy_dense": (32, 1_199_104),
    "synthetic.copy_tsa": (32, 1_219_909),
    "synthetic.sort_dense": (32, 1_199_104),
    "synthetic.sort_tsa": (32, 1_219_909),
}


def model(method: MethodConfig | None = None, **changes) -> LanguageModel:
    return build(RunConfig(model=replace(TINY, **changes), method=method or TSAConfig())).eval()


@cache
def papers() -> LanguageModel:
    """TSA in the Shakespeare shape, as initialised: large enough to measure standard deviations. Do not modify."""
    return build(RunConfig(model=ModelConfig(vocab_size=65), method=TSAConfig()))


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, time), generator=torch.Generator().manual_seed(0))


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHAPES)
def test_the_number_of_parameters_is_the_papers(recipe):
    vocabulary, parameters = SHAPES[recipe]
    config = RECIPES[recipe]()
    built = build(replace(config, model=replace(config.model, vocab_size=vocabulary)))
    assert sum(p.numel() for p in built.parameters()) == parameters


def test_a_router_adds_as_many_parameters_as_the_paper_says():
    d = 256
    for router in papers().method.routers():
        assert sum(p.numel() for p in router.parameters()) == d * d // 4 + d // 2 + 1


def test_which_layers_have_a_bias():
    for module in papers().modules():
        if isinstance(module, Attention):
            assert module.qkv.bias is None
            assert module.out.bias is None
        if isinstance(module, FeedForward):
            assert module.up.bias is not None
            assert module.down.bias is not None
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_the_head_is_the_token_embedding():
    tiny, ids = model(), tokens(2, 5)
    assert not [name for name, p in tiny.named_parameters() if p.shape == (11, 32) and name != "embedding.weight"]
    states: list[Tensor] = []
    hook = tiny.norm.register_forward_hook(lambda _m, _i, out: states.append(out))
    logits = tiny(ids).logits
    hook.remove()
    assert torch.equal(logits, F.linear(states[0], tiny.embedding.weight))


def test_token_zero_is_a_token_like_any_other():
    """In Tiny-Shakespeare it is the newline; a padding index would freeze its embedding at zero."""
    tiny = model()
    assert tiny.embedding.padding_idx is None
    assert tiny.embedding.weight[0].any()
    # Through the input only: the tied head would give row 0 a gradient in any case.
    tiny.embedding(torch.zeros(1, dtype=torch.long)).sum().backward()
    assert tiny.embedding.weight.grad[0].any()


# --- initialisation ---------------------------------------------------------------------------------------------------


def deviation(tensors: list[Tensor]) -> float:
    return float(torch.cat([t.detach().flatten() for t in tensors]).std())


def test_the_initial_deviations_are_the_papers():
    """Within 5%. The smallest of these samples has 16,640 elements, so its deviation has an error of 0.5%."""
    attentions = [m for m in papers().modules() if isinstance(m, Attention)]
    networks = [m for m in papers().modules() if isinstance(m, FeedForward)]
    residual = 0.02 / math.sqrt(2 * 6)
    assert deviation([papers().embedding.weight]) == pytest.approx(0.02, rel=0.05)
    assert deviation([papers().positions.weight]) == pytest.approx(0.02, rel=0.05)
    for attention, network in zip(attentions, networks, strict=True):
        assert deviation([attention.out.weight]) == pytest.approx(residual, rel=0.05)
        assert deviation([network.down.weight]) == pytest.approx(residual, rel=0.05)


def test_the_residual_deviation_falls_with_the_number_of_layers():
    for n_layer in (2, 8):
        out = model(d_model=128, n_layer=n_layer).method.blocks[0].attention.out.weight
        assert deviation([out]) == pytest.approx(0.02 / math.sqrt(2 * n_layer), rel=0.05)


def test_all_other_layers_start_as_pytorch_starts_them():
    """Uniform within 1 / sqrt(fan in), which has a standard deviation of bound / sqrt(3)."""
    residual = {id(m) for a in papers().modules() if isinstance(a, Attention) for m in [a.out]}
    residual |= {id(m) for f in papers().modules() if isinstance(f, FeedForward) for m in [f.down]}
    linears = {name: m for name, m in papers().named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 6 * 4 + 5 * 2
    for name, linear in linears.items():
        bound = 1 / math.sqrt(linear.in_features)
        if id(linear) not in residual and linear.out_features > 1:
            assert deviation([linear.weight]) == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        if id(linear) not in residual:
            assert linear.weight.abs().max() <= bound, name
        if linear.bias is not None and linear.out_features > 1:
            # At least 64 draws: the probability that all stay below 0.9 of the bound is 0.9^64 = 0.1%.
            assert 0.9 * bound < linear.bias.abs().max() <= bound, name


def test_the_last_bias_of_a_router_is_exactly_minus_one():
    assert [router.logit.bias.tolist() for router in papers().method.routers()] == [[-1.0]] * 5


# --- behaviour --------------------------------------------------------------------------------------------------------


def test_a_full_context_fits_and_one_token_more_does_not():
    tiny = model()
    assert tiny(tokens(1, 16)).logits.shape == (1, 16, 11)
    with pytest.raises(UserError, match=r"17 tokens do not fit this model's context of 16"):
        tiny(tokens(1, 17))


def test_more_tokens_than_the_context_do_not_fit_with_a_mask_either():
    everything = torch.ones(1, 17, dtype=torch.bool)
    with pytest.raises(UserError, match=r"17 tokens do not fit this model's context of 16"):
        model()(tokens(1, 17), valid=everything)


@torch.no_grad()
def test_a_cache_does_not_lengthen_the_context():
    tiny = model()
    cache = KVCache(TINY, 1, 20, like=tiny.norm.weight)
    tiny(tokens(1, 16), cache=cache)
    with pytest.raises(UserError, match=r"17 tokens do not fit this model's context of 16"):
        tiny(tokens(1, 1), cache=cache)


@torch.no_grad()
def test_more_than_a_cache_holds_does_not_fit():
    tiny = model()
    cache = KVCache(TINY, 1, 6, like=tiny.norm.weight)
    tiny(tokens(1, 4), cache=cache)
    with pytest.raises(UserError, match=r"the cache holds 6 tokens, 7 were given"):
        tiny(tokens(1, 3), cache=cache)


@torch.no_grad()
def test_a_cache_counts_real_tokens_and_padding_takes_no_column():
    tiny = model()
    cache = KVCache(TINY, 2, 10, like=tiny.norm.weight)
    tiny(tokens(2, 4), cache=cache, valid=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool))
    tiny(tokens(2, 1), cache=cache)
    assert cache.longest == 5
    assert cache.lengths.tolist() == [3, 5]
    assert cache.valid[:, 0, :10].tolist() == [[True, True, True, *[False] * 7]] * 3


@pytest.mark.parametrize("method", [DenseConfig(), TSAConfig()], ids=["dense", "tsa"])
def test_dropout_is_for_training_only(method):
    dropping, plain, ids = model(method, dropout=0.5), model(method), tokens(2, 8)
    for execution in EXECUTIONS:
        assert torch.equal(dropping(ids, execution=execution).logits, dropping(ids, execution=execution).logits)
        assert torch.equal(dropping(ids, execution=execution).logits, plain(ids, execution=execution).logits)
    dropping.train()
    assert not torch.equal(dropping(ids).logits, dropping(ids).logits)


def test_without_dropout_training_computes_what_evaluation_does():
    tiny, ids = model(), tokens(2, 8)
    evaluated = tiny(ids).logits
    assert torch.equal(tiny.train()(ids).logits, evaluated)


def test_the_mask_by_hand():
    """Two new tokens after two cached ones. The first and third key are padding; the third still sees itself."""
    mask = causal_mask(2, 4, torch.tensor([[False, True, False, True]]), None)
    assert mask.int().tolist() == [[[[0, 1, 1, 0], [0, 1, 0, 1]]]]


def test_positions_are_learned_and_added():
    """The same token at two positions gives different results, and position t is row t of the table."""
    tiny, ids = model(DenseConfig()), torch.zeros(1, 2, dtype=torch.long)
    first, second = tiny(ids).logits[0]
    assert not torch.equal(first, second)
    with torch.no_grad():
        tiny.positions.weight[1] = tiny.positions.weight[0]
    first, second = tiny(ids).logits[0]
    # Two equal tokens: attention's mean over both equals either, up to float32 rounding.
    assert torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def test_the_dense_block_by_hand():
    """h + attention(norm(h)), then h + ffn(norm(h)), with the sums of attention written out."""
    tiny = model(DenseConfig(), n_layer=1)
    block, h = tiny.method.blocks[0], torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    x = F.layer_norm(h, (32,))
    q, k, v = (block.attention.qkv.weight @ x[0].T).T.chunk(3, dim=-1)
    mixed = torch.zeros(3, 32)
    for head in range(4):
        columns = slice(8 * head, 8 * head + 8)
        for t in range(3):
            scores = torch.stack([q[t, columns] @ k[s, columns] / math.sqrt(8) for s in range(t + 1)])
            mixed[t, columns] = sum(w * v[s, columns] for s, w in enumerate(scores.softmax(0)))
    after = h[0] + mixed @ block.attention.out.weight.T
    up, down = block.ffn.up, block.ffn.down
    inner = F.layer_norm(after, (32,)) @ up.weight.T + up.bias
    gelu = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
    expected = after + gelu @ down.weight.T + down.bias
    # Sums of at most 64 terms of order 1 in float32: 64 x 6e-8.
    assert torch.allclose(block(h, Context())[0], expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(
    ("method", "heads", "dtype", "captured"),
    [
        (TSAConfig(), 4, torch.bfloat16, True),
        (BudgetConfig(), 4, torch.bfloat16, True),
        (TSAConfig(), 4, torch.float32, False),
        (TSAConfig(), 8, torch.bfloat16, False),
        (TSAConfig(skip="ffn"), 4, torch.bfloat16, False),
        (MoDConfig(), 4, torch.bfloat16, True),
        (MoDConfig(), 8, torch.bfloat16, False),
        (SwitchConfig(), 4, torch.bfloat16, False),
        (EarlyExitConfig(), 4, torch.bfloat16, False),
        (DenseConfig(), 8, torch.float32, True),
    ],
)
def test_a_pass_is_one_graph_only_where_nobody_asks_the_host(method, heads, dtype, captured):
    model = ModelConfig(d_model=64, n_layer=2, n_head=heads, d_ff=64, context=8, vocab_size=7)
    assert build(RunConfig(model=model, method=method)).to(dtype).can_be_captured is captured


@pytest.mark.parametrize(
    "other",
    [
        {"norm": "rms"},
        {"positions": "rotary"},
        {"n_kv_head": 2},
        {"head_width": 32},
        {"attention_bias": "qkv"},
        {"qk_norm": True},
        {"ffn": "swiglu"},
        {"ffn": "geglu"},
        {"ffn_bias": False},
    ],
    ids=str,
)
def test_kernels_take_every_kind_of_block(other):
    """So that a sparse forward pass needs no host synchronisation."""
    shape = ModelConfig(d_model=64, n_layer=2, n_head=4, d_ff=64, context=8, vocab_size=7, **other)
    assert build(RunConfig(model=shape, method=TSAConfig())).bfloat16().can_be_captured
    odd = replace(shape, d_ff=72)
    assert not build(RunConfig(model=odd, method=TSAConfig())).bfloat16().can_be_captured, "no whole tiles"


# --- other layers -----------------------------------------------------------------------------------------------------


def test_a_head_of_its_own_is_not_the_embedding():
    tied, own = model(), model(tie_head=False)
    assert tied.head is None
    assert own.head.weight.shape == own.embedding.weight.shape
    assert deviation([model(tie_head=False, d_model=256).head.weight]) == pytest.approx(0.02, rel=0.05)
    ids, before = tokens(2, 5), own(tokens(2, 5)).logits
    with torch.no_grad():
        own.head.weight.mul_(2)
    assert torch.equal(own(ids).logits, 2 * before)
    with torch.no_grad():
        own.embedding.weight.mul_(2)
    assert not torch.equal(own(ids).logits, 2 * before)


def test_embeddings_are_scaled_on_their_way_in_alone():
    """Like larger embeddings with an unchanged head."""
    tied, apart = model(embedding_scale=3.0), model(tie_head=False)
    weights = {**tied.state_dict(), "head.weight": tied.embedding.weight}
    apart.load_state_dict({**weights, "embedding.weight": 3 * tied.embedding.weight})
    ids = tokens(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(tied(ids).logits, apart(ids).logits)
        assert not torch.allclose(tied(ids).logits, model()(ids).logits)


def test_rotary_positions_tell_places_apart():
    """Swapping two tokens before a third one makes a difference; without rotation it would not."""
    rotary = model(DenseConfig(), positions="rotary", n_layer=1)
    one, other = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    with torch.no_grad():
        for matrix in (p for p in rotary.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
        assert (rotary(one).logits - rotary(other).logits)[0, 2].abs().max() > 1e-3
        rotary.positions.frequencies.zero_()
        torch.testing.assert_close(rotary(one).logits[0, 2], rotary(other).logits[0, 2], rtol=1e-5, atol=1e-5)


def test_entering_is_what_a_pass_gives_its_method():
    for shape in ({}, {"positions": "rotary"}):
        tiny, ids, seen = model(DenseConfig(), **shape), tokens(2, 5), []
        tiny.method.register_forward_pre_hook(lambda _m, given, seen=seen: seen.append(given))
        tiny(ids, execution="hard")
        hidden, ctx = tiny.entering(ids, "hard")
        assert torch.equal(hidden, seen[0][0])
        assert ctx.execution == "hard"
        if shape:
            assert torch.equal(torch.stack(ctx.rotation), torch.stack(seen[0][1].rotation))
        else:
            assert ctx.rotation is None
