"""Both norms by hand, and the parts that routers and kernels read."""

import math

import pytest
import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.layers.norm import make_norm, norm_weights, without_scale

EPS = 0.1
"""Large enough that leaving it out or misplacing it changes the norm."""


def norm_of(kind: str) -> nn.Module:
    """With a nontrivial scale and shift."""
    norm = make_norm(ModelConfig(d_model=4, n_head=1, norm=kind, norm_eps=EPS))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, -1.0, 0.5, 3.0]))
        if norm_weights(norm).shift is not None:
            norm.bias.copy_(torch.tensor([1.0, 0.0, -1.0, 0.25]))
    return norm


def states() -> Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)) + 1.0


def by_hand(kind: str, state: list[float]) -> list[float]:
    """Before scale and shift."""
    mean = sum(state) / 4 if kind == "layer" else 0.0
    spread = math.sqrt(sum((x - mean) ** 2 for x in state) / 4 + EPS)
    return [(x - mean) / spread for x in state]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_by_hand(kind):
    norm, h = norm_of(kind), states()
    scale, shift = [2.0, -1.0, 0.5, 3.0], [1.0, 0.0, -1.0, 0.25] if kind == "layer" else [0.0] * 4
    for state, normed in zip(h.flatten(0, 1).tolist(), norm(h).flatten(0, 1).tolist(), strict=True):
        plain = by_hand(kind, state)
        assert normed == pytest.approx([p * a + b for p, a, b in zip(plain, scale, shift, strict=True)], abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_without_scale_leaves_out_scale_and_shift_alone(kind):
    norm, h = norm_of(kind), states()
    for state, normed in zip(h.flatten(0, 1).tolist(), without_scale(norm, h).flatten(0, 1).tolist(), strict=True):
        assert normed == pytest.approx(by_hand(kind, state), abs=1e-6)


def test_the_weights_of_a_norm_say_which_it_is():
    layer, rms = norm_of("layer"), norm_of("rms")
    assert (norm_weights(layer).scale is layer.weight, norm_weights(layer).shift is layer.bias) == (True, True)
    assert (norm_weights(rms).scale is rms.weight, norm_weights(rms).shift) == (True, None)
    assert norm_weights(layer).eps == norm_weights(rms).eps == EPS
    assert [name for name, _ in rms.named_parameters()] == ["weight"]


def test_a_norm_starts_without_effect():
    for kind in ("layer", "rms"):
        norm, h = make_norm(ModelConfig(norm=kind)), torch.randn(2, 256)
        torch.testing.assert_close(norm(h), without_scale(norm, h))
        assert norm.eps == 1e-5
