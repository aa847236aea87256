"""qkv_attention: the kernel against the attention layer in float64.

The kernel is measured in a subprocess, this file run as a script: Triton's interpreter has to be chosen before Triton
is imported. On a GPU the same script measures the real kernel, in bfloat16.
"""

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tokendepth.config import ModelConfig
from tokendepth.context import Context
from tokendepth.layers.attention import Attention
from tokendepth.layers.positions import RotaryPositions
from tokendepth.ops.qkv_attention import takes
from tokendepth.ops.varlen_attention import Varlen


class Case(NamedTuple):
    counts: tuple[int, ...]
    """Rows of each sequence."""
    heads: int = 2
    kv_heads: int = 2
    width: int = 32
    normed: bool = True
    turned: bool = True
    spare: int = 0
    """Rows of one more sequence, longer than allowed and never read; packed forward passes end with one."""


CASES = {
    "one row": Case((1,)),
    "ragged": Case((5, 0, 19, 1)),
    "more than a tile": Case((70, 3)),
    "shared keys": Case((7, 12), heads=4, kv_heads=2),
    "one head of keys": Case((20, 20), heads=3, kv_heads=1, width=48),
    "plain": Case((3, 17), normed=False, turned=False),
    "turned": Case((17, 17), normed=False, width=40),
    "normed": Case((6, 33), turned=False),
    "spare rows": Case((5, 18), spare=90),
    "none": Case((0, 0)),
}
ON_A_GPU = {
    "the study's": Case((256,) * 64, heads=4, kv_heads=4, width=64),
    "packed": Case((61, 70, 128, 3, 0, 250) * 10, heads=4, kv_heads=4, width=64),
    "packed, spare rows": Case((61, 70, 128), heads=4, kv_heads=4, width=64, spare=900),
    "SmolLM2's": Case((1024,) * 4, heads=9, kv_heads=3, width=64, normed=False),
    "wide": Case((200, 300), heads=2, kv_heads=2, width=128),
}
MEASURED = {**CASES, **(ON_A_GPU if torch.cuda.is_available() else {})}


def model_of(case: Case) -> ModelConfig:
    heads = {"n_head": case.heads, "n_kv_head": case.kv_heads, "qk_norm": case.normed}
    return ModelConfig(d_model=case.heads * case.width, context=8192, positions="rotary", dropout=0.0, **heads)


def layer(case: Case) -> Attention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = Attention(model_of(case), 0).double().eval()
        for norm in (attention.norm_q, attention.norm_k):
            if norm is not None:
                norm.weight.data.uniform_(0.5, 1.5)
    return attention


def context(case: Case) -> Context:
    """For concatenated rows, which are three positions apart in their sequences."""
    counts, model = torch.tensor([*case.counts, *([case.spare] if case.spare else [])]), model_of(case)
    places = torch.cat([3 * torch.arange(count) for count in counts.tolist()])
    cos, sin = (part[0] for part in RotaryPositions(model).rotation(places))
    starts, sequence = F.pad(counts.cumsum(0), (1, 0)).int(), torch.arange(len(counts)).repeat_interleave(counts)
    varlen = Varlen(starts, counts, sequence, places, max(case.counts))
    return Context(varlen=varlen, rotation=(cos, sin) if case.turned else None)


def states(case: Case) -> Tensor:
    rng = torch.Generator().manual_seed(len(case.counts))
    return torch.randn(sum(case.counts) + case.spare, case.heads * case.width, generator=rng, dtype=torch.float64)


def test_only_short_sequences_with_even_heads_in_low_precision_on_a_gpu(kernels_on_a_gpu):
    found = []
    x = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    ask = lambda h: found.extend(takes(h, *which) for which in ((64, 5), (16, 5), (33, 5), (256, 5), (64, 5000)))  # noqa: E731
    with torch.no_grad():
        assert not takes(x, 64, 5), "not on a CPU"
        kernels_on_a_gpu(ask, x)
        assert found == [True, False, False, False, False]
        kernels_on_a_gpu(lambda h: found.append(takes(h, 64, 5)), x.float())
    kernels_on_a_gpu(lambda h: found.append(takes(h, 64, 5)), x)
    assert found[5:] == [False, False]


@torch.no_grad()
def test_the_layer_calls_it(kernels_on_a_gpu):
    attention, ctx = layer(CASES["ragged"]), context(CASES["ragged"])

    def run(x: Tensor, weights: dict[str, Tensor], rotation: tuple[Tensor, Tensor], varlen: Varlen) -> Tensor:
        return functional_call(attention, weights, (x, replace(ctx, rotation=rotation, varlen=varlen)))

    weights = {name: weight.bfloat16() for name, weight in attention.state_dict().items()}
    given = states(CASES["ragged"]).bfloat16(), weights, ctx.rotation, ctx.varlen
    assert kernels_on_a_gpu(run, *given) == ["qkv_attention"]


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """The script prints `[kernel's error, the library's]` for each case, both against the layer in float64."""
    assert measured.keys() == MEASURED.keys()
    rounding = 2.0**-24
    too_large = {name: pair for name, pair in measured.items() if not pair[0] <= 2 * pair[1] + 8 * rounding}
    assert too_large == {}


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30))


@torch.no_grad()
def main() -> None:
    from tokendepth.ops.qkv_attention import kernel as module

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if device == "cpu":  # the interpreter works tile by tile, even if a tile is nearly empty
        module.TILES |= {"BLOCK_M": 32, "BLOCK_N": 16}
    found = {}
    for name, case in MEASURED.items():
        attention, ctx, x = layer(case), context(case), states(case)
        exact = attention(x, ctx)
        rotation = ctx.rotation and tuple(part.to(device) for part in ctx.rotation)
        varlen = Varlen(*(part.to(device) if isinstance(part, Tensor) else part for part in ctx.varlen))
        attention, x, ctx = attention.to(device, dtype), x.to(device, dtype), replace(ctx, rotation=rotation)
        by_kernel = attention.out(attention._attended_at_once(attention.qkv(x), ctx, varlen))
        parts = attention.qkv(x).split([attention.q_out, attention.kv_out // 2, attention.kv_out // 2], dim=-1)
        by_library = attention.out(attention._attended_varlen(*parts, ctx, varlen))
        read = sum(case.counts)
        found[name] = [error(part[:read], exact[:read]) for part in (by_kernel, by_library)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
