"""carry_rows: packed rows spread to all tokens, against carry_on of the same rows in their places."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokendepth.ops.carry_on import carry_on, carry_rows
from tokendepth.ops.carry_on.reference import reference

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@contextmanager
def asks_nothing(device: str) -> Iterator[None]:
    """Host synchronisation is an error."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.integers(0, 2**20), st.sampled_from(["last", "smooth"])
)
def test_packed_rows_are_carried_as_all_tokens_are(batch, time, more, seed, kind):
    """With unused rows behind the active ones, and with gradients, in float64."""
    rng = torch.Generator().manual_seed(seed)
    active = torch.rand(batch, time, generator=rng) < 0.4
    keep = torch.where(active, torch.rand(batch, time, generator=rng, dtype=torch.float64) * (kind == "smooth"), 1.0)
    count = int(active.sum(1).max()) + more
    rows = torch.randn(batch, count, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(batch, time, 3, generator=rng, dtype=torch.float64)
    there = torch.arange(count) < active.sum(1, keepdim=True)
    fresh = torch.zeros(batch, time, 3, dtype=torch.float64).index_put((active,), rows[there])
    expected = reference(fresh, keep)
    own = torch.ones(batch, count, dtype=torch.float64).index_put((there,), keep[active])
    found = carry_rows(carry_on(rows, own) if kind == "smooth" else rows, active)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad((out * weight).sum(), rows, retain_graph=True)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)


def test_the_gradient_of_packed_rows_is_summed_exactly_in_low_precision():
    """512 tokens with gradient 1 get the same row: bfloat16 cannot count beyond 256."""
    rows = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    active = torch.zeros(1, 512, dtype=torch.bool)
    active[0, 0] = True
    carry_rows(rows, active).sum().backward()
    assert rows.grad is not None
    assert rows.grad.item() == 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_on_every_device_the_same_each_time(device, dtype):
    """At the size of a training step, against float64; on a GPU without host synchronisation."""
    rng = torch.Generator().manual_seed(0)
    active = torch.rand(64, 256, generator=rng) < 0.25
    rows, weight = (torch.randn(64, n, 256, generator=rng).to(dtype) for n in (96, 256))

    def run(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        leaf = rows.to(device, dtype).requires_grad_()
        mask, scale = active.to(device), weight.to(device, dtype)
        with asks_nothing(device):
            out = carry_rows(leaf, mask)
            (grad,) = torch.autograd.grad((out * scale).sum(), leaf)
        return out.detach(), grad

    found, again, exact = run(dtype, device), run(dtype, device), run(torch.float64, "cpu")
    for one, other, right in zip(found, again, exact, strict=True):
        assert one.equal(other)
        torch.testing.assert_close(one.cpu().double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5)
