"""Routers decide in float32 or better, regardless of the precision of states and weights."""

import pytest
import torch
from torch import Tensor, nn

from tokendepth.layers.routers import HaltingUnit, LinearRouter, Router

D = 32
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_router = pytest.mark.parametrize("kind", [Router, LinearRouter, HaltingUnit])


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind(D)


def states(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, 50, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_hand(router: nn.Module, h: Tensor) -> Tensor:
    """In float64."""
    weights = {name: p.double() for name, p in router.named_parameters()}
    x = h.double()
    if isinstance(router, Router):
        x = (x @ weights["hidden.weight"].T + weights["hidden.bias"]).relu()
    weight = weights.get("logit.weight", weights.get("weight"))
    return (x @ weight.T + weights.get("logit.bias", 0.0))[..., 0]


@torch.no_grad()
@each_router
@each_dtype
def test_states_of_any_precision_give_logits_in_float32(kind, dtype):
    """The states are already rounded; nothing is rounded to low precision after that."""
    router, h = made(kind), states(dtype)
    logits = router(h)
    assert logits.shape == (2, 50)
    assert logits.dtype == torch.float32
    # Sums of 32 terms of order 1 in float32.
    torch.testing.assert_close(logits.double(), by_hand(router, h), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", [LinearRouter, HaltingUnit])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_low_precision_are_multiplied_in_float32(kind, dtype):
    router, h = made(kind).to(dtype), states(dtype)
    logits = router(h)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), by_hand(router, h), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@each_router
def test_weights_in_float64_compute_in_float64(kind):
    router, h = made(kind).double(), states(torch.float64)
    logits = router(h)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, by_hand(router, h), rtol=1e-13, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_router_in_low_precision_answers_in_float32(dtype):
    """Hidden units and the result are rounded to the dtype of the weights: a few errors of 2^-9 each."""
    router, h = made(Router).to(dtype), states(dtype)
    logits, exact = router(h), by_hand(router, h)
    terms = (h.double().abs() @ router.hidden.weight.double().abs().T + router.hidden.bias.double().abs()).float()
    terms = terms @ router.logit.weight[0].float().abs() + router.logit.bias.float().abs()
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs() <= 3 * 2**-9 * terms).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", [LinearRouter, HaltingUnit])
def test_autocast_rounds_no_decision(kind):
    router, h = made(kind), states(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = router(h)
        assert nn.Linear(D, 1)(h).dtype == torch.bfloat16, "another layer is rounded"
    assert torch.equal(inside, router(h))


@each_router
def test_what_a_decision_costs(kind):
    matrices = sum(p.numel() for p in made(kind).parameters() if p.ndim == 2)
    assert made(kind).flops == 2 * matrices


def test_several_answers_keep_their_axis():
    router, h = LinearRouter(D, out=3), states(torch.float32)
    assert router(h).shape == (2, 50, 3)
    assert router.flops == 2 * D * 3


@each_router
def test_gradients_reach_weights_and_states(kind):
    router, h = made(kind), states(torch.bfloat16).requires_grad_()
    router(h).sum().backward()
    assert h.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.any() for p in router.parameters())
