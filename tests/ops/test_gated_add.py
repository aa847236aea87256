"""gated_add: `eager`, with its own backward, against the simple `reference` and against finite differences."""

import pytest
import torch
from torch import Tensor

from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.gated_add.eager import eager
from tokendepth.ops.gated_add.reference import reference

SIZES = [(1, 1, 1), (3, 7, 5), (2, 13, 33), (5, 1, 64), (1, 17, 3), (0, 4, 8), (2, 0, 8)]
EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}

each_size = pytest.mark.parametrize("size", SIZES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", EPSILON, ids=["float64", "float32"])


def inputs(size: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    h, update = torch.randn(2, *size, generator=rng, dtype=torch.float64).to(dtype)
    gate = torch.rand(size[:2], generator=rng, dtype=torch.float64).to(dtype)
    return h, update, gate


def gradients(op, h: Tensor, update: Tensor, gate: Tensor, weight: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (h, update, gate)]
    (op(*leaves) * weight).sum().backward()
    return [leaf.grad for leaf in leaves]


@each_size
@each_dtype
def test_forward_equals_the_reference(size, dtype):
    """Up to one rounding of the product and one of the sum; a fused multiply-add saves the first."""
    h, update, gate = inputs(size, dtype)
    actual, expected = eager(h, update, gate), reference(h, update, gate)
    assert actual.dtype == dtype
    assert actual.shape == h.shape
    assert ((actual - expected).abs() <= EPSILON[dtype] * (h.abs() + update.abs())).all()


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 4), (1, 5, 7)], ids=str)
def test_gradients_are_those_of_finite_differences(size):
    leaves = [t.requires_grad_() for t in inputs(size, torch.float64)]
    assert torch.autograd.gradcheck(gated_add, leaves)


@each_size
@each_dtype
def test_gradients_equal_the_references(size, dtype):
    """The gate's gradient is a sum of d products, with d roundings of their magnitude; the others are one product."""
    h, update, gate = inputs(size, dtype)
    weight, _, _ = inputs(size, dtype, seed=1)
    actual, expected = (gradients(op, h, update, gate, weight) for op in (eager, reference))
    magnitude = (weight.abs(), weight.abs(), size[2] * (weight * update).abs().sum(-1))
    for a, e, m in zip(actual, expected, magnitude, strict=True):
        assert a.dtype == dtype
        assert ((a - e).abs() <= EPSILON[dtype] * m).all()


@pytest.mark.parametrize("op", [reference, eager])
def test_a_gate_of_zero_leaves_the_state_and_a_gate_of_one_adds_all(op):
    h, update, _ = inputs((2, 5, 3), torch.float32)
    gate = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 1]])
    for given in (gate.float(), gate.bool()):
        out = op(h, update, given)
        assert out.dtype == torch.float32
        assert torch.equal(out[gate == 0], h[gate == 0])
        assert torch.equal(out[gate == 1], (h + update)[gate == 1])


@pytest.mark.parametrize("op", [reference, eager])
def test_a_gate_is_one_number_for_a_token(op):
    out = op(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[10.0, 20.0]] * 2]), torch.tensor([[0.5, 0.1]]))
    assert out.flatten().tolist() == pytest.approx([6, 12, 4, 6])


def test_a_decision_takes_no_gradient_and_lets_it_pass_to_what_it_keeps():
    h, update, _ = inputs((2, 3, 4), torch.float32)
    active = torch.tensor([[True, False, True], [False, False, True]])
    h.requires_grad_()
    update.requires_grad_()
    eager(h, update, active).sum().backward()
    assert (h.grad == 1).all()
    assert torch.equal(update.grad, active[..., None].expand_as(update).float())


def test_an_update_in_lower_precision_is_added_in_the_states():
    """As under autocast: blocks compute in bfloat16, and the residual stream stays in float32."""
    h, update, gate = inputs((2, 3, 4), torch.float32)
    half = update.bfloat16().requires_grad_()
    out = eager(h, half, gate)
    assert out.dtype == torch.float32
    assert ((out - reference(h, half.float(), gate)).abs() <= 2.0**-23 * (h.abs() + update.abs())).all()
    out.sum().backward()
    assert half.grad.dtype == torch.bfloat16
    # d out / d update = gate, rounded to bfloat16 (8 bits: half a unit is 2^-9 relative).
    assert ((half.grad.float() - gate[..., None]).abs() <= 2.0**-9 * gate[..., None]).all()


def test_views_are_taken_and_inputs_left_as_they_were():
    h, update, gate = (t.transpose(0, 1) for t in inputs((3, 7, 5), torch.float64))
    before = [t.clone() for t in (h, update, gate)]
    out = eager(h, update, gate)
    assert ((out - reference(*before)).abs() <= 2.0**-52 * (before[0].abs() + before[1].abs())).all()
    assert all(torch.equal(a, b) for a, b in zip((h, update, gate), before, strict=True))
