"""sparse_attention: `eager` against the simple `reference`, at awkward sizes, with poisoned memory.

In float64 both are precise to 1e-15 per term, so 1e-12 of the largest value is rounding. In float32, against the
reference in float64, it is 6e-8 per term and sums have at most 20 terms, so 1e-5 is.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokendepth.ops.sparse_attention import eager as eager_module
from tokendepth.ops.sparse_attention import sparse_attention
from tokendepth.ops.sparse_attention.eager import eager
from tokendepth.ops.sparse_attention.reference import reference

SIZES = [  # batch, time, keys already in the cache, heads, width, heads of keys and values
    (1, 1, 0, 1, 1, 1),
    (3, 7, 0, 2, 5, 2),
    (2, 13, 4, 3, 6, 3),
    (5, 1, 15, 4, 8, 4),
    (2, 17, 3, 1, 3, 1),
    (1, 11, 3, 2, 4, 2),
    (1, 9, 5, 4, 6, 2),
    (3, 8, 7, 4, 3, 2),
    (1, 7, 0, 4, 5, 1),
    (2, 10, 3, 4, 5, 1),
]
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}

each_size = pytest.mark.parametrize("size", SIZES, ids=str)
each_active = pytest.mark.parametrize("active", ["none", "one", "some", "all"])
masked = pytest.mark.parametrize("mask", [False, True], ids=["all keys", "key_valid"])
placed = pytest.mark.parametrize("columns", [False, True], ids=["last keys", "columns"])


@pytest.fixture(autouse=True, params=["a call per sequence", "a call per half of one", "padded", "products if alone"])
def _way(request, monkeypatch):
    """All code paths in `eager`, on any machine and at every size."""
    monkeypatch.setattr(eager_module, "_launches_cost", lambda q: request.param == "padded")
    if request.param != "products if alone":
        monkeypatch.setattr(eager_module, "FEW_SCORES", 0)
    if request.param == "a call per half of one":
        monkeypatch.setattr(eager_module, "MANY_ROWS", 0)


def inputs(size: tuple[int, ...], which: str, *, mask: bool = False, columns: bool = False) -> tuple[Tensor, ...]:
    """q, k, v, active, key_valid (or None) and columns (or None), in float64.

    Columns are ragged: each sequence has its own length, and its tokens are anywhere among its keys, in order.
    """
    batch, time, cached, heads, width, kv_heads = size
    rng = torch.Generator().manual_seed(sum(size))
    k, v = torch.randn(2, batch, kv_heads, cached + time, width, generator=rng, dtype=torch.float64)
    active = torch.rand(batch, time, generator=rng) < {"some": 0.4, "all": 1.0}.get(which, 0.0)
    if which == "one":
        active[batch // 2, time // 2] = True
    if which == "some":
        active[0], active[-1, -1] = False, True  # a sequence without any, unless it is the only one
    q = torch.randn(int(active.sum()), heads, width, generator=rng, dtype=torch.float64)
    key_valid = torch.rand(batch, cached + time, generator=rng) < 0.6 if mask else None
    lengths = torch.randint(time, cached + time + 1, (batch,), generator=rng).tolist()
    places = torch.stack([torch.randperm(length, generator=rng)[:time].sort().values for length in lengths])
    return q, k, v, active, key_valid, places if columns else None


def to(dtype: torch.dtype, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]


def assert_rounding(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    if expected.numel():
        assert (actual - expected).abs().max() <= ROUNDING[actual.dtype] * expected.abs().max()


@each_size
@each_active
@masked
@placed
def test_eager_equals_the_reference(size, active, mask, columns):
    arguments = inputs(size, active, mask=mask, columns=columns)
    expected = reference(*arguments)
    for dtype in ROUNDING:
        actual = eager(*to(dtype, arguments))
        assert actual.dtype == dtype
        assert len(actual) == int(arguments[3].sum())
        assert_rounding(actual, expected)


@each_size
@pytest.mark.parametrize("active", ["one", "some", "all"])  # without rows there is nothing to differentiate
@masked
@placed
def test_gradients_equal_the_references(size, active, mask, columns):
    *tensors, flags, key_valid, places = inputs(size, active, mask=mask, columns=columns)
    weight = torch.linspace(1, 2, tensors[0].shape[-1], dtype=torch.float64)
    gradients = []
    for op in (eager, reference):
        leaves = [t.clone().requires_grad_() for t in tensors]
        (op(*leaves, flags, key_valid, places) * weight).sum().backward()
        gradients.append([t.grad for t in leaves])
    for actual, expected in zip(*gradients, strict=True):
        # At least 1: gradients that should be zero (a row with one key) are rounding errors of terms of that size.
        assert (actual - expected).abs().max() <= 1e-12 * max(1.0, float(expected.abs().max()))


def test_the_reference_is_the_definition():
    """Two tokens, one head of width 1: the second sees both, with weights e^2 and e^6."""
    q, k, v = torch.tensor([[[2.0]]]), torch.tensor([[[[1.0], [3.0]]]]), torch.tensor([[[[10.0], [20.0]]]])
    weights = torch.tensor([2.0, 6.0]).softmax(0)
    expected = (weights[0] * 10 + weights[1] * 20).item()
    for op in (reference, eager, sparse_attention):
        assert op(q, k, v, torch.tensor([[False, True]])).item() == pytest.approx(expected, rel=1e-6)
        assert op(q, k, v, torch.tensor([[True, False]])).item() == pytest.approx(10), "the first sees itself"
        hidden = torch.tensor([[False, False]])
        own = op(q, k, v, torch.tensor([[False, True]]), hidden).item()
        assert own == pytest.approx(20), "a token always sees its own key"
        first, second = (op(q, k, v, torch.tensor([[True]]), None, torch.tensor([[n]])).item() for n in (0, 1))
        assert first == pytest.approx(10), "it stands at the first key"
        assert second == pytest.approx(expected, rel=1e-6)


@each_size
@pytest.mark.parametrize("active", ["one", "some", "all"])
@placed
def test_all_rows_are_those_of_dense_attention(size, active, columns):
    """The rows of some tokens equal the same rows in attention for all tokens."""
    q, k, v, everything, _, places = inputs(size, "all", columns=columns)
    chosen = inputs(size, active)[3]
    found = eager(q[chosen.flatten()], k, v, chosen, None, places)
    assert_rounding(found, eager(q, k, v, everything, None, places)[chosen.flatten()])


@pytest.mark.parametrize("size", [size for size in SIZES if size[3] != size[5]], ids=str)
def test_a_group_of_heads_shares_its_keys_and_values(size):
    """As if each head had its own, the same for neighbours."""
    q, k, v, active, key_valid, places = inputs(size, "some", mask=True, columns=True)
    own_k, own_v = (kept.repeat_interleave(size[3] // size[5], dim=1) for kept in (k, v))
    for op in (eager, reference):
        assert_rounding(op(q, k, v, active, key_valid, places), op(q, own_k, own_v, active, key_valid, places))


@each_size
def test_the_last_keys_are_columns_too(size):
    q, k, v, active, key_valid, _ = inputs(size, "some", mask=True)
    last = torch.arange(size[2], size[2] + size[1]).expand(size[0], -1)
    for op in (eager, reference):
        assert_rounding(op(q, k, v, active, key_valid, last), op(q, k, v, active, key_valid))


@each_size
@placed
def test_what_must_not_be_seen_is_not(size, columns):
    """Later and invalid keys hold values that would dominate the result; finite, because weight 0 times NaN is NaN."""
    q, k, v, active, key_valid, places = inputs(size, "some", mask=True, columns=columns)
    cached, (batch, time) = size[2], active.shape
    seen = torch.zeros(batch, cached + time, dtype=torch.bool)
    for b, t in active.nonzero().tolist():
        own = cached + t if places is None else int(places[b, t])
        seen[b, : own + 1] |= key_valid[b, : own + 1]
        seen[b, own] = True
    hidden = ~seen[:, None, :, None]
    poisoned = (k.masked_fill(hidden, 1e200), v.masked_fill(hidden, 1e200))
    assert_rounding(eager(q, *poisoned, active, key_valid, places), reference(q, k, v, active, key_valid, places))


def test_a_sequence_reads_no_other_one():
    q, k, v, active, _, _ = inputs((3, 7, 0, 2, 5, 2), "some")
    expected = reference(q, k, v, active)
    for other in range(3):
        k_poisoned, v_poisoned = k.clone(), v.clone()
        k_poisoned[other], v_poisoned[other] = torch.nan, torch.nan
        kept = active.nonzero()[:, 0] != other
        assert_rounding(eager(q, k_poisoned, v_poisoned, active)[kept], expected[kept])


def test_the_op_takes_views():
    """As in the model: heads split from a row, transposed, and a slice of a cache."""
    q, k, v, active, key_valid, _ = inputs((2, 13, 4, 3, 6, 3), "some", mask=True)
    buffers = [torch.full((2, 3, 40, 6), torch.nan, dtype=torch.float64) for _ in range(2)]
    for buffer, tensor in zip(buffers, (k, v), strict=True):
        buffer[:, :, :17] = tensor
    k_view, v_view = (buffer[:, :, :17] for buffer in buffers)
    q_view = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not k_view.is_contiguous()
    assert not q_view.is_contiguous()
    assert_rounding(eager(q_view, k_view, v_view, active, key_valid), reference(q, k, v, active, key_valid))


def test_the_inputs_are_left_as_they_were():
    arguments = inputs((2, 13, 4, 3, 6, 3), "some", mask=True, columns=True)
    before = [t.clone() for t in arguments]
    eager(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_one_sequence_is_as_contiguous_as_a_compiler_is_told():
    q, k, v, active, _, _ = inputs((1, 9, 0, 3, 4, 3), "all")
    with sdpa_kernel(SDPBackend.MATH):  # returns rows in a different memory order
        assert eager(q, k, v, active).is_contiguous()
