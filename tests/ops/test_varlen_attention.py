"""varlen_attention: `eager` against the simple `reference`, at awkward lengths, with poisoned memory.

In float64 both are precise to 1e-15 per term, so 1e-12 of the largest value is rounding. In float32, against the
reference in float64, it is 6e-8 per term and sums have at most 20 terms, so 1e-5 is.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tokendepth.measure.flops import count_flops
from tokendepth.ops.varlen_attention import eager as eager_module
from tokendepth.ops.varlen_attention import varlen_attention
from tokendepth.ops.varlen_attention.reference import reference

COUNTS = [(1,), (0,), (0, 0), (5, 0, 3), (1, 1, 1), (0, 7, 1, 4), (13, 2)]
HEADS = [(1, 1), (3, 3), (4, 2), (4, 1)]  # of queries, of keys and values
EARLIER = (4, 0, 6, 1)
"""Earlier keys of each sequence, if there is a cache."""

each_counts = pytest.mark.parametrize("counts", COUNTS, ids=str)
each_heads = pytest.mark.parametrize("heads", HEADS, ids=str)
each_source = pytest.mark.parametrize("cached", [False, True], ids=["rows", "cache"])


@pytest.fixture(autouse=True, params=["a call per sequence", "padded"])
def _way(request, monkeypatch):
    """Both code paths in `eager`, on any machine."""
    monkeypatch.setattr(eager_module, "_launches_cost", lambda q: request.param == "padded")


def inputs(counts: tuple[int, ...], heads: tuple[int, int], cached: bool) -> tuple[Any, ...]:
    """In float64. A cache has more columns than keys, and the columns behind the keys must not be seen."""
    rng = torch.Generator().manual_seed(sum(counts) + sum(heads))
    rows, width = sum(counts), 5
    q = torch.randn(rows, heads[0], width, generator=rng, dtype=torch.float64)
    lengths = torch.tensor(counts)
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    if not cached:
        k, v = torch.randn(2, rows, heads[1], width, generator=rng, dtype=torch.float64)
        return q, k, v, starts, lengths, max(counts)
    lengths = lengths + torch.tensor(EARLIER[: len(counts)])
    k, v = torch.randn(2, len(counts), heads[1], 20, width, generator=rng, dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:], v[b, :, length:] = 1e3, 1e6
    return q, k, v, starts, lengths, max(counts)


@each_counts
@each_heads
@each_source
def test_it_equals_the_reference(counts, heads, cached):
    q, k, v, *lengths = inputs(counts, heads, cached)
    expected = reference(q, k, v, *lengths)
    for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        actual = varlen_attention(q.to(dtype), k.to(dtype), v.to(dtype), *lengths)
        assert actual.shape == expected.shape
        assert actual.dtype == dtype
        assert not actual.isnan().any()
        if expected.numel():
            assert (actual - expected).abs().max() <= rounding * expected.abs().max()


def test_a_row_by_hand():
    """The second sequence's second row sees its first and itself, and nothing of the first sequence."""
    k = torch.tensor([[[9.0]], [[0.0]], [[2.0]]])
    v = torch.tensor([[[100.0]], [[1.0]], [[3.0]]])
    q = torch.tensor([[[1.0]], [[1.0]], [[1.0]]])
    out = varlen_attention(q, k, v, torch.tensor([0, 1, 3]), torch.tensor([1, 2]), 2).flatten()
    weight = 1 / (1 + torch.tensor(2.0).exp())  # of the first: exp(0) / (exp(0) + exp(2))
    torch.testing.assert_close(out, torch.stack([v[0, 0, 0], v[1, 0, 0], 3 - 2 * weight]))


@each_source
def test_a_compiler_takes_it_as_one_op(cached):
    q, k, v, *lengths = inputs((5, 0, 3), (4, 2), cached)
    torch.compiler.reset()
    with torch.no_grad():
        fast = torch.compile(varlen_attention, backend="eager", fullgraph=True, dynamic=True)
        assert torch.equal(fast(q, k, v, *lengths), varlen_attention(q, k, v, *lengths))


def test_rows_cost_as_many_keys_as_their_own_sequence_has(monkeypatch):
    """On a CPU: two products per row, key of its sequence, and head."""
    monkeypatch.setattr(eager_module, "_launches_cost", lambda q: False)
    for cached, pairs in ((False, 5 * 5 + 3 * 3), (True, 5 * 9 + 3 * 9)):
        arguments = inputs((5, 0, 3), (4, 2), cached)
        assert count_flops(partial(varlen_attention, *arguments)) == 2 * 2 * 4 * 5 * pairs
