"""Feed-forward networks by hand: GELU, SwiGLU and GeGLU, with and without biases."""

import math

import pytest
import torch
from torch import Tensor

from tokendepth.config import ModelConfig
from tokendepth.layers.ffn import FeedForward, GatedFeedForward, make_ffn

D, FF = 6, 10


def network(ffn: str, bias: bool = True) -> FeedForward | GatedFeedForward:
    """With matrices large enough to matter."""
    torch.manual_seed(0)
    made = make_ffn(ModelConfig(d_model=D, n_head=1, d_ff=FF, ffn=ffn, ffn_bias=bias))
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_()
    return made


def states() -> Tensor:
    return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1))


def act(ffn: str, x: float) -> float:
    if ffn == "gelu":  # exact
        return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
    if ffn == "geglu":  # the tanh form, as in models with GeGLU
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + math.exp(-x))


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ffn", ["gelu", "swiglu", "geglu"])
def test_by_hand(ffn, bias):
    made, h = network(ffn, bias), states()
    first = made.up if isinstance(made, FeedForward) else made.gate_up
    for state, answer in zip(h.flatten(0, 1), made(h).flatten(0, 1), strict=True):
        inner = (first.weight @ state + (first.bias if bias else 0)).tolist()
        if ffn == "gelu":
            hidden = [act(ffn, x) for x in inner]
        else:
            gate, up = inner[:FF], inner[FF:]
            hidden = [act(ffn, g) * u for g, u in zip(gate, up, strict=True)]
        expected = made.down.weight @ torch.tensor(hidden) + (made.down.bias if bias else 0)
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ffn", "products"), [("gelu", 2), ("swiglu", 3), ("geglu", 3)])
def test_what_a_network_is_made_of_and_costs(ffn, products):
    for bias in (True, False):
        made = network(ffn, bias)
        matrices = [p for p in made.parameters() if p.ndim == 2]
        biases = [p for p in made.parameters() if p.ndim == 1]
        assert sum(p.numel() for p in matrices) == products * D * FF
        assert sum(p.numel() for p in biases) == ((products - 1) * FF + D if bias else 0)
        assert made.flops == 2 * products * D * FF


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_what_is_added_to_the_residual_stream_starts_small(ffn):
    torch.manual_seed(0)
    made = make_ffn(ModelConfig(d_model=128, n_head=1, d_ff=128, n_layer=8, ffn=ffn))
    assert float(made.down.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
