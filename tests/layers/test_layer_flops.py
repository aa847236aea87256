"""The reported FLOPs of a block, of any kind, are those dispatched; so are those of a training step."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tokendepth.cache import KVCache
from tokendepth.config import DenseConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.measure.flops import count_flops, training_flops
from tokendepth.methods import build

TIME = 10
BASE = ModelConfig(d_model=32, n_layer=2, n_head=4, d_ff=40, context=TIME, dropout=0.0, vocab_size=11)
HEADS = {"own": {}, "grouped": {"n_kv_head": 2}, "single": {"n_kv_head": 1}, "wide": {"n_kv_head": 2, "head_width": 12}}
FFN = {"gelu": {}, "swiglu": {"ffn": "swiglu"}, "geglu": {"ffn": "geglu", "ffn_bias": False}}
REST = {
    "plain": {},
    "modern": {"norm": "rms", "positions": "rotary", "qk_norm": True, "attention_bias": "all", "tie_head": False},
}
SHAPES = {f"{a}-{b}-{c}": replace(BASE, **HEADS[a], **FFN[b], **REST[c]) for a, b, c in product(HEADS, FFN, REST)}

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def model_of(shape: ModelConfig, method=None):
    return build(RunConfig(model=shape, method=method or DenseConfig())).eval()


@each_shape
def test_a_dense_pass_costs_what_its_sites_add_up_to(shape):
    model, ids = model_of(shape), torch.zeros(3, TIME, dtype=torch.long)
    sites = [block.site("block", TIME, routed=False) for block in model.method.blocks]
    per_token = sum(site.always + site.active for site in sites) + model.head_flops
    assert count_flops(lambda: model(ids)) == ids.numel() * per_token
    by_hand = 2 * 32 * 11  # the head
    width, ffn = shape.head_width or 8, 2 if shape.ffn == "gelu" else 3
    queries, kv = 4 * width, (shape.n_kv_head or 4) * width
    by_hand += 2 * (2 * (32 * (queries + 2 * kv) + queries * 32 + ffn * 32 * 40) + 4 * TIME * queries)
    assert per_token == by_hand


@pytest.mark.parametrize("batch", [1, 3])  # a single sequence uses a different code path
@pytest.mark.parametrize("name", ["grouped-swiglu-modern", "single-gelu-plain", "wide-geglu-modern"])
def test_a_skipped_token_costs_what_its_site_says(name, batch):
    model, ids = model_of(SHAPES[name], TSAConfig()), torch.zeros(batch, TIME, dtype=torch.long)
    decisions = torch.rand(1, batch, TIME, generator=torch.Generator().manual_seed(0)) < 0.5
    out = []
    flops = count_flops(lambda: out.append(model(ids, execution="sparse", decisions=decisions)))
    assert 0 < decisions.sum() < decisions.numel()
    assert flops == out[0].trace.totals().flops


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", ["own-gelu-plain", "grouped-swiglu-modern"])
def test_a_pass_over_a_cache_costs_what_its_trace_says(name, fixed):
    """A query attends to as many keys as the longest sequence has, or to all columns."""
    shape = SHAPES[name]
    model = model_of(shape)
    cache = KVCache(shape, 2, 9, like=model.norm.weight.detach(), fixed=fixed)
    ids, out = torch.zeros(2, 3, dtype=torch.long), []
    for keys in (3, 6):
        flops = count_flops(lambda: out.append(model(ids, cache=cache)))
        assert flops == out[-1].trace.totals().flops
        sites = [block.site("block", 9 if fixed else keys, routed=False) for block in model.method.blocks]
        assert flops == ids.numel() * (sum(site.always + site.active for site in sites) + model.head_flops)


@pytest.mark.parametrize("name", ["own-gelu-plain", "grouped-swiglu-modern", "single-gelu-plain", "wide-geglu-modern"])
def test_a_step_of_training_costs_three_passes(name):
    """Each product has two more in the backward pass."""
    shape = SHAPES[name]
    sites = [block.site("block", TIME, routed=False) for block in model_of(shape).method.blocks]
    passes = sum(site.always + site.active for site in sites) + 2 * 32 * 11
    assert training_flops(RunConfig(model=shape, method=DenseConfig())) == 3 * passes
