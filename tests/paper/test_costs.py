"""Keys and values of a method, computed from the share of tokens that each block processed, are those in a cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paper.costs import keys_and_values
from tokendepth.cache import KVCache
from tokendepth.config import METHOD_CONFIGS, ModelConfig, MoRConfig, RunConfig, SpanConfig
from tokendepth.methods import build
from tokendepth.model import LanguageModel

MODEL = ModelConfig(d_model=32, n_layer=6, n_head=4, d_ff=64, context=16, vocab_size=23)
GROUPED = replace(MODEL, n_kv_head=2)
TOKEN = 2 * 4 * 32
"""Bytes of one token's keys and values in one block."""
SKIPPED_LEAVE_NOTHING = {"mod", "mor", "itt", "span"}
CASES = {
    **{name: RunConfig(model=MODEL, method=config()) for name, config in METHOD_CONFIGS.items()},
    "mor-grouped": RunConfig(model=GROUPED, method=MoRConfig()),
    "span": RunConfig(model=MODEL, method=SpanConfig(decide="dice")),
    "span-all": RunConfig(model=MODEL, method=SpanConfig(decide="dice", keys="all")),
    "span-width": RunConfig(model=MODEL, method=SpanConfig(decide="dice", width=48)),
    "span-grouped": RunConfig(model=GROUPED, method=SpanConfig(decide="dice")),
}


def in_cache(model: LanguageModel, ids: Tensor) -> tuple[float, float, list[float]]:
    """Bytes per token that are stored after reading `ids`, and reserved; and the share processed at each site."""
    layers = model.method.cache_layers
    cache = KVCache(model.config, len(ids), ids.shape[1], layers=layers, like=model.embedding.weight)
    trace = model(ids, execution="sparse", cache=cache).trace
    token = 2 * 4 * model.config.kv_heads * model.config.width
    stored = token * int(cache.valid.sum()) / ids.numel()
    return stored, token * layers, trace.work.mean((1, 2)).tolist()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_is_what_a_cache_holds(case):
    config, ids = CASES[case], torch.randint(23, (3, 16), generator=torch.Generator().manual_seed(0))
    stored, reserved, shares = in_cache(build(config).eval(), ids)
    assert keys_and_values(config, shares) == pytest.approx((stored, reserved))
    if case.split("-")[0] in SKIPPED_LEAVE_NOTHING and case != "span-all":
        assert stored < reserved, "some token must be skipped, else this shows nothing"
    else:
        assert stored == reserved


def test_keys_and_values_by_hand():
    """A span of four of six blocks, taken by a quarter of the tokens: 2 + 4 / 4 blocks of the dense model's six."""
    shares = [1.0, *[0.25] * 4, 1.0]
    assert keys_and_values(CASES["span"], shares) == (3 * TOKEN, 6 * TOKEN)
    assert keys_and_values(CASES["span-all"], shares) == (6 * TOKEN, 6 * TOKEN)
    assert keys_and_values(CASES["dense"], [1.0] * 6) == (6 * TOKEN, 6 * TOKEN)
