"""Compaction: a list of the active rows, gathered and put back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.ops.compact import compact, put, take
from tokendepth.ops.compact.reference import reference


@given(
    batch=st.integers(1, 5),
    time=st.integers(1, 37),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_list_is_the_reference(batch, time, share, seed):
    active = torch.rand(batch, time, generator=torch.Generator().manual_seed(seed)) < share
    assert torch.equal(compact(active), reference(active))


def test_by_hand():
    active = torch.tensor([[False, True, True], [True, False, False]])
    rows = compact(active)
    assert rows.tolist() == [1, 2, 3]
    x = torch.arange(6.0).view(2, 3, 1)
    assert take(x, rows).flatten().tolist() == [1, 2, 3]
    assert put(x, rows, torch.tensor([[10.0], [20.0], [30.0]])).flatten().tolist() == [0, 10, 20, 30, 4, 5]
    assert x.flatten().tolist() == [0, 1, 2, 3, 4, 5], "the original is left alone"


@given(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_put_takes_back_what_take_took(seed, share):
    dice = torch.Generator().manual_seed(seed)
    x, active = torch.randn(3, 7, 5, generator=dice), torch.rand(3, 7, generator=dice) < share
    rows = compact(active)
    assert torch.equal(put(x, rows, take(x, rows)), x)
    poisoned = put(torch.full_like(x, torch.nan), rows, take(x, rows))
    assert torch.equal(poisoned[active], x[active])
    assert poisoned[~active].isnan().all()
