"""Rows taken out and spread again: what they are, and that each is the other's gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.ops.chosen_rows import ChosenRows, spread, take

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def test_rows_by_hand():
    rows = ChosenRows.at(torch.tensor([2, 0]), tokens=3)
    assert rows.rank.tolist() == [1, 2, 0]
    assert rows.chosen.tolist() == [True, False, True]
    assert take(X, rows).tolist() == [[5.0, 6.0], [1.0, 2.0]]
    assert spread(take(X, rows), rows).tolist() == [[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]]
    assert take(X[:, 0], rows).tolist() == [5.0, 1.0]


def test_what_is_not_finite_stays_in_its_row():
    rows = ChosenRows.at(torch.tensor([1]), tokens=3)
    assert spread(torch.tensor([torch.nan]), rows).nan_to_num(7.0).tolist() == [0.0, 7.0, 0.0]


@given(st.integers(1, 12).flatmap(lambda tokens: st.tuples(st.just(tokens), st.permutations(range(tokens)))), st.data())
def test_each_is_the_others_gradient(tokens_and_order, data):
    tokens, order = tokens_and_order
    n = data.draw(st.integers(0, tokens))
    rows = ChosenRows.at(torch.tensor(order[:n], dtype=torch.long), tokens)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(n, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(take(x, rows), x[rows.places])
    torch.testing.assert_close(spread(values, rows), torch.zeros_like(x).index_copy(0, rows.places, values))
    if n:
        assert torch.autograd.gradcheck(lambda x: take(x, rows), x)
        assert torch.autograd.gradcheck(lambda v: spread(v, rows), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_keeps_the_precision(dtype):
    x = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
    take(x, ChosenRows.at(torch.tensor([3, 1]), tokens=4)).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
