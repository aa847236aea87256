"""Few rows times a matrix on a CPU: the library's product to rounding, left to the library wherever that is better."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendepth.ops.few_rows import eager
from tokendepth.ops.few_rows.eager import MOST_ROWS, SMALLEST, linear

ROUNDING = 2.0**-22


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def cut(monkeypatch) -> list[torch.Size]:
    """Of every matrix that is cut from now on: the shape of its pieces."""
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
