"""A few rows times a matrix on a CPU: equal to the library up to rounding; left to the library if that is better."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendepth.ops.few_rows import eager
from tokendepth.ops.few_rows.eager import MOST_ROWS, SMALLEST, PackedMatrices, linear

ROUNDING = 2.0**-22


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def cut(monkeypatch) -> list[torch.Size]:
    """Records the shape of the pieces of every matrix that is split."""
    seen, bmm = [], torch.bmm

    def told(rows, pieces):
        seen.append(pieces.shape)
        return bmm(rows, pieces)

    monkeypatch.setattr(torch, "bmm", told)
    return seen


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), max_size=2), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.integers(2, 5),
    st.integers(0, 999),
)  # fmt: skip
@torch.no_grad()
def test_it_is_the_library_s_product(before, pieces, width, bias, threads, seed):
    dice = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(*before, width, generator=dice), torch.randn(pieces * threads, width, generator=dice)
    added = torch.randn(len(weight), generator=dice) if bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "SMALLEST", 0)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        found = linear(x, weight, added)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    scale = F.linear(x.abs().double(), weight.abs().double()) + (0 if added is None else added.abs())
    assert found.shape == exact.shape
    assert ((found - exact).abs() <= ROUNDING * width * scale).all()


@torch.no_grad()
def test_a_large_matrix_is_cut_for_every_thread(monkeypatch):
    seen, weight = cut(monkeypatch), torch.randn(512, 256)
    linear(torch.randn(MOST_ROWS, 256), weight)
    assert seen == [(2, 256, 256)]


@pytest.mark.parametrize(
    "case", ["many rows", "no rows", "small", "one thread", "odd", "transposed", "half", "learning", "double"]
)
def test_the_library_has_the_others_whole(case, monkeypatch):
    seen, x, weight = cut(monkeypatch), torch.randn(3, 256), torch.randn(512, 256)
    if case == "many rows":
        x = torch.randn(MOST_ROWS + 1, 256)
    elif case == "no rows":
        x = torch.randn(0, 256)
    elif case == "small":
        weight = torch.randn(SMALLEST // 256 - 2, 256)
    elif case == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    elif case == "odd":
        weight = torch.randn(513, 256)
    elif case == "transposed":
        weight = torch.randn(256, 512).T
    elif case in ("half", "double"):
        x, weight = (part.to(torch.bfloat16 if case == "half" else torch.float64) for part in (x, weight))
    with torch.set_grad_enabled(case == "learning"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert not seen


# --- matrices that are kept packed ------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """Matrices are packed at first use."""
    monkeypatch.setattr(eager, "PATIENCE", 0)


def packing(monkeypatch) -> list[torch.Size]:
    """Records the shape of every matrix that is packed."""
    seen, pack = [], torch.ops.mkldnn._reorder_linear_weight

    class Told:
        _linear_pointwise = torch.ops.mkldnn._linear_pointwise

        @staticmethod
        def _reorder_linear_weight(matrix, rows):
            seen.append(matrix.shape)
            return pack(matrix, rows)

    monkeypatch.setattr(torch.ops, "mkldnn", Told)
    return seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("before", [(1,), (2,), (32,), (4, 1), (2, 3)])
@torch.no_grad()
def test_packed_it_is_the_library_s_product(before, bias, at_once, monkeypatch):
    seen, x, weight = packing(monkeypatch), torch.randn(*before, 256), torch.randn(600, 256)
    added = torch.randn(600) if bias else None
    with PackedMatrices([weight]).used():
        found = linear(x, weight, added)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    scale = F.linear(x.abs().double(), weight.abs().double()) + (0 if added is None else added.abs())
    assert seen == [weight.shape]
    assert found.shape == exact.shape
    assert ((found - exact).abs() <= ROUNDING * 256 * scale).all()


@torch.no_grad()
def test_a_matrix_is_packed_once_however_often_it_is_used(at_once, monkeypatch):
    seen, weight = packing(monkeypatch), torch.randn(512, 256)
    matrices = PackedMatrices([weight])
    with matrices.used():
        several = [linear(torch.ones(rows, 256), weight) for rows in (1, 5, 32)]
    with matrices.used():
        again = linear(torch.ones(3, 256), weight)
    assert seen == [weight.shape]
    for found in (*several, again):
        torch.testing.assert_close(found, weight.sum(1).expand_as(found), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_of_a_matrix_are_packed_apart(at_once, monkeypatch):
    seen, weight, x = packing(monkeypatch), torch.randn(1024, 256), torch.randn(4, 256)
    with PackedMatrices([weight]).used():
        first, last, whole = (linear(x, part) for part in (weight[:512], weight[512:], weight))
    assert seen == [(512, 256), (512, 256), (1024, 256)]
    torch.testing.assert_close(torch.cat([first, last], 1), whole, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_a_matrix_that_was_changed_is_packed_again(at_once):
    weight, x = torch.randn(512, 256), torch.randn(4, 256)
    with PackedMatrices([weight]).used():
        before = linear(x, weight)
        weight.mul_(2)
        torch.testing.assert_close(linear(x, weight), 2 * before)


@pytest.mark.parametrize("bias", [torch.arange(1024.0)[::2], torch.arange(512.0)], ids=["strided", "contiguous"])
@torch.no_grad()
def test_packed_with_a_bias_in_any_memory(bias, at_once):
    weight, x = torch.randn(512, 256), torch.randn(4, 256)
    with PackedMatrices([weight]).used():
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_matrix_whose_memory_was_replaced_is_read_where_it_is_now(at_once):
    layer, x = torch.nn.Linear(256, 512, bias=False), torch.randn(4, 256)
    with PackedMatrices(layer.parameters()).used():
        before = linear(x, layer.weight)
        layer.weight.data = 2 * layer.weight.data
        torch.testing.assert_close(linear(x, layer.weight), 2 * before)


@pytest.mark.parametrize(
    "case", ["no library", "many rows", "another matrix", "not in use", "in another thread", "made in inference"]
)
@torch.no_grad()
def test_others_are_not_packed(case, at_once, monkeypatch):
    seen, rows = packing(monkeypatch), MOST_ROWS + 1 if case == "many rows" else 4
    if case == "no library":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with torch.inference_mode(case == "made in inference"):
        x, weight = torch.randn(rows, 256), torch.randn(512, 256)
    matrices = PackedMatrices([torch.randn(512, 256) if case == "another matrix" else weight])
    if case == "not in use":
        with matrices.used():
            pass
        found = linear(x, weight)
    elif case == "in another thread":
        with matrices.used(), ThreadPoolExecutor(1) as threads:
            found = threads.submit(torch.no_grad()(linear), x, weight).result()
    else:
        with matrices.used():
            found = linear(x, weight)
    assert not seen
    torch.testing.assert_close(found, F.linear(x, weight), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_matrix_is_packed_after_some_products(monkeypatch):
    seen, weight = packing(monkeypatch), torch.randn(512, 256)
    with PackedMatrices([weight]).used():
        for _ in range(eager.PATIENCE):
            linear(torch.ones(2, 256), weight)
        assert not seen
        linear(torch.ones(2, 256), weight)
    assert seen == [weight.shape]
