"""Attention in all shapes: shared keys and values, biases, normalised and rotated queries and keys; packed and skipped.

If both sides compute the same float32 sums of some dozens of terms of order 1, they may differ by 1e-5.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import ModelConfig
from tokendepth.layers.attention import Attention, causal_mask
from tokendepth.layers.positions import RotaryPositions, rotated
from tokendepth.model import Block, Context, Rows
from tokendepth.ops.rows import ChosenRows

TIME = 12
CLASSIC = ModelConfig(d_model=32, n_layer=1, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=11)
MODERN = replace(
    CLASSIC, norm="rms", positions="rotary", n_kv_head=2, qk_norm=True, ffn="swiglu", ffn_bias=False, tie_head=False
)
SHAPES = {
    "classic": CLASSIC,
    "rotary": replace(CLASSIC, positions="rotary"),
    "grouped": replace(CLASSIC, n_kv_head=2),
    "single": replace(CLASSIC, n_kv_head=1, positions="rotary", attention_bias="all"),
    "wide": replace(CLASSIC, head_width=12, n_kv_head=2),
    "normed": replace(CLASSIC, qk_norm=True),
    "modern": MODERN,
}

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_execution = pytest.mark.parametrize("execution", ["hard", "sparse"])
each_batch = pytest.mark.parametrize("batch", [1, 3])  # a single sequence uses a different code path


def lively(module: torch.nn.Module) -> torch.nn.Module:
    """Every weight and bias matters, norms and biases too."""
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=dice) * 0.3 + (1.0 if p.ndim == 1 else 0.0))
    return module.eval()


def states(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randn(batch, time, 32, generator=torch.Generator().manual_seed(1))


def some(batch: int = 2) -> Tensor:
    return torch.rand(batch, TIME, generator=torch.Generator().manual_seed(2)) < 0.5


def context(shape: ModelConfig, execution: str = "soft", valid: Tensor | None = None) -> Context:
    """With the rotation for a whole sequence, if positions are rotary."""
    positions = torch.arange(TIME) if valid is None else (valid.long().cumsum(1) - 1).clamp(min=0)
    rotation = RotaryPositions(shape).rotation(positions) if shape.positions == "rotary" else None
    return Context(execution, valid=valid, rotation=rotation)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def by_hand(attention: Attention, shape: ModelConfig, x: Tensor) -> Tensor:
    """One sequence `[time, d]`, head by head and token by token, with projections sliced from `qkv` by hand."""
    heads, kv_heads, width = shape.n_head, shape.n_kv_head or shape.n_head, shape.head_width or 32 // shape.n_head
    projected = x @ attention.qkv.weight.T + (0 if attention.qkv.bias is None else attention.qkv.bias)
    cuts = [heads * width, kv_heads * width, kv_heads * width]
    q, k, v = (part.unflatten(-1, (-1, width)) for part in projected.split(cuts, dim=-1))
    if shape.qk_norm:
        q, k = (
            part / (part.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * norm.weight
            for part, norm in ((q, attention.norm_q), (k, attention.norm_k))
        )
    if shape.positions == "rotary":
        rotation = RotaryPositions(shape).rotation(torch.arange(len(x)))
        q, k = (rotated(part[None], rotation)[0] for part in (q, k))
    gathered = torch.zeros(len(x), heads, width)
    for head in range(heads):
        shared = head // (heads // kv_heads)  # neighbours share a head
        for t in range(len(x)):
            weights = (k[: t + 1, shared] @ q[t, head] / math.sqrt(width)).softmax(0)
            gathered[t, head] = weights @ v[: t + 1, shared]
    return gathered.flatten(1) @ attention.out.weight.T + (0 if attention.out.bias is None else attention.out.bias)


@torch.no_grad()
@each_shape
def test_every_shape_by_hand(shape):
    attention, x = lively(Attention(shape, 0)), states()
    y = attention(x, context(shape))
    for b in range(len(x)):
        assert_close(y[b], by_hand(attention, shape, x[b]))


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [1, 2])
@each_execution
@each_batch
def test_shared_keys_and_values_are_heads_of_their_own_repeated(kv_heads, execution, batch):
    """A block with one K/V head per query head, whose weights are the shared ones, repeated."""
    grouped = lively(Block(replace(CLASSIC, n_kv_head=kv_heads), 0))
    full = lively(Block(CLASSIC, 0))
    weights = grouped.state_dict()
    q, k, v = weights["attention.qkv.weight"].split([32, 8 * kv_heads, 8 * kv_heads])
    k, v = (part.unflatten(0, (kv_heads, 8)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1) for part in (k, v))
    full.load_state_dict({**weights, "attention.qkv.weight": torch.cat([q, k, v])})
    for rows in (None, Rows(some(batch))):
        for keys in ("all", "active"):
            x, y = (block(states(batch), context(CLASSIC, execution), rows, keys=keys) for block in (grouped, full))
            assert_close(x, y)


def test_which_projections_have_a_bias():
    found = {}
    for bias in ("none", "qkv", "all"):
        attention = Attention(replace(CLASSIC, attention_bias=bias), 0)
        found[bias] = attention.qkv.bias is not None, attention.out.bias is not None
    assert found == {"none": (False, False), "qkv": (True, False), "all": (True, True)}


@torch.no_grad()
def test_queries_and_keys_are_normed_before_they_are_turned():
    """The scale differs between the two elements of a pair, so that the order matters."""
    shape = replace(CLASSIC, positions="rotary", qk_norm=True)
    attention, x = lively(Attention(shape, 0)), states(1)
    rotation = context(shape).rotation
    projected = F.linear(x, attention.qkv.weight[:32]).unflatten(-1, (4, 8))
    normed = projected / (projected.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm_q.weight
    assert_close(attention.queries(x, rotation), rotated(normed, rotation))
    turned_first = rotated(projected, rotation)
    other = turned_first / (turned_first.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm_q.weight
    assert not torch.allclose(attention.queries(x, rotation), other, atol=1e-2)


# --- packed, skipped and gathered rows --------------------------------------------------------------------------------


@torch.no_grad()
@each_shape
@pytest.mark.parametrize("padded", [False, True])
def test_packed_rows_are_the_unpacked_ones(shape, padded):
    """Selected tokens as a shorter sequence: at their own positions, attending only to each other."""
    block, h = lively(Block(shape, 0)), states()
    places = torch.tensor([[1, 4, 5, 10], [0, 2, 9, 11]])
    active = torch.zeros(2, TIME, dtype=torch.bool).scatter(1, places, torch.ones(2, 4, dtype=torch.bool))
    valid = None
    if padded:
        valid = torch.ones(2, TIME, dtype=torch.bool)
        valid[0, 6:9] = valid[1, 1:4] = False
    ctx = context(shape, "hard", valid)
    index = places[..., None].expand(-1, -1, 32)
    packed = block(h.gather(1, index), ctx.packed(places))
    whole = block(h, ctx, Rows(ctx.real(active)), keys="active").gather(1, index)
    there = torch.ones(2, 4, dtype=torch.bool) if valid is None else valid.gather(1, places)
    assert there.sum() == (7 if padded else 8)
    assert_close(packed[there], whole[there])


@torch.no_grad()
@each_shape
@pytest.mark.parametrize("padded", [False, True])
def test_packed_rows_that_only_fill_up_are_seen_by_nobody(shape, padded):
    block, h = lively(Block(shape, 0)), states(1)
    valid = torch.ones(1, TIME, dtype=torch.bool)
    valid[0, :2] = False  # token 1 is padding, which no token sees either
    ctx = context(shape, valid=valid if padded else None)
    places, there = torch.tensor([[1, 4, 7, 9]]), torch.tensor([[True, True, False, True]])
    filled = block(h[:, [1, 4, 7, 9]], ctx.packed(places, there))
    real = [1, 3] if padded else [0, 1, 3]
    without = block(h[:, places[0, real]], ctx.packed(places[:, real]))
    assert_close(filled[:, real], without)
    assert not torch.allclose(block(h[:, places[0]], ctx.packed(places))[:, 3], filled[:, 3], atol=1e-3)


@torch.no_grad()
@each_shape
@each_batch
@pytest.mark.parametrize("keys", ["all", "active", "given"])
def test_sparse_is_hard(shape, keys, batch):
    block, h, active = lively(Block(shape, 0)), states(batch), some(batch)
    gate, found = torch.rand(batch, TIME, generator=torch.Generator().manual_seed(3)), {}
    for execution in ("hard", "sparse"):
        ctx = context(shape, execution)
        over = keys
        if keys == "given":  # from other states
            kv = F.linear(block.norm_attention(h.flip(1)), *block.attention.kv_weights())
            over = block.attention.leave_keys(kv, ctx)
        found[execution] = [block(h.clone(), ctx, Rows(active), keys=over, gate=g) for g in (None, gate)]
    for hard, sparse in zip(found["hard"], found["sparse"], strict=True):
        assert_close(sparse, hard)
        assert torch.equal(sparse[~active], h[~active])
        assert (hard - h)[active].abs().amax(-1).min() > 1e-3
    assert not torch.allclose(*found["hard"], atol=1e-2), "the gate is seen"


@each_shape
def test_rows_that_are_gathered_while_training_are_those_that_are_masked(shape):
    """Outputs, and the gradients of all parameters."""
    block, h, active = lively(Block(shape, 0)).train(), states(), some()
    gate = torch.rand(2, TIME, generator=torch.Generator().manual_seed(3))
    chosen = ChosenRows.at(active.flatten().nonzero()[:, 0], active.numel())
    gathered, masked = (
        block(h, context(shape), rows, gate=gate) for rows in (Rows(active, chosen=chosen), Rows(active))
    )
    assert_close(gathered, masked)
    parameters = list(block.parameters())
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (gathered, masked)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.any()


@torch.no_grad()
@each_shape
def test_sequences_twice_are_the_sequences(shape):
    block, h, valid = lively(Block(shape, 0)), states(), torch.ones(2, TIME, dtype=torch.bool)
    valid[1, 3:8] = False  # in the middle: distances differ from those of the first sequence
    for mask in (None, valid):
        ctx = context(shape, valid=mask)
        once, twice = block(h, ctx), block(torch.cat([h, h]), ctx.twice())
        assert_close(twice, torch.cat([once, once]))


# --- the mask ---------------------------------------------------------------------------------------------------------


def test_the_mask_with_columns_by_hand():
    """New tokens at columns 1, 2 and 0, 3 of four; a token always sees its own column."""
    seen = torch.tensor([[True, False, True, True], [False, True, False, False]])
    mask = causal_mask(2, 4, seen, torch.tensor([[1, 2], [0, 3]]))
    assert mask.int().tolist() == [[[[1, 1, 0, 0], [1, 0, 1, 0]]], [[[1, 0, 0, 0], [0, 1, 0, 1]]]]
    assert causal_mask(2, 4, None, torch.tensor([[1, 3]])).int().tolist() == [[[[1, 1, 0, 0], [1, 1, 1, 1]]]]


# --- costs ------------------------------------------------------------------------------------------------------------


@each_shape
def test_what_a_token_costs_by_hand(shape):
    attention = Attention(shape, 0)
    width = shape.head_width or 8
    queries, kv = 4 * width, (shape.n_kv_head or 4) * width
    assert attention.kv_flops == 2 * 32 * 2 * kv
    assert attention.row_flops(10) == 2 * 32 * queries + 2 * 10 * 2 * queries + 2 * queries * 32
