"""Some of a batch's tokens as rows: listed, gathered, scattered back, and multiplied by a matrix.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, in bfloat16.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tokendepth.ops.carry_on import carry_on
from tokendepth.ops.decide import decide
from tokendepth.ops.rows import ChosenRows, Listed, compact, last_active, product_of_rows, put, take
from tokendepth.ops.rows.reference import reference

ROUNDING = 2.0**-24  # of a float32

# batch, time, d, out. Sizes that are not powers of two; more rows or columns than one block; no rows.
SIZES = {
    "one token": (1, 1, 16, 16),
    "ragged": (2, 19, 33, 40),
    "columns": (3, 7, 72, 300),
    "blocks of rows": (2, 150, 32, 24),
    "none": (0, 5, 16, 8),
}
ON_A_GPU = {"the paper's": (64, 256, 256, 512), "GPT-2's": (4, 512, 768, 1536)}
MEASURED = {**SIZES, **(ON_A_GPU if torch.cuda.is_available() else {})}
SHARES = {"none": 0.0, "one": None, "some": 0.4, "all": 1.0}


# --- the list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [(1, 1), (1, 37), (5, 1), (3, 19), (0, 4)], ids=str)
def test_the_list_is_the_reference(size, share):
    for seed in range(5):
        active = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share
        assert torch.equal(compact(active), reference(active))


def test_by_hand():
    active = torch.tensor([[False, True, True], [True, False, False]])
    rows = compact(active)
    assert rows.tolist() == [1, 2, 3]
    x = torch.arange(6.0).view(2, 3, 1)
    assert take(x, rows).flatten().tolist() == [1, 2, 3]
    assert put(x, rows, torch.tensor([[10.0], [20.0], [30.0]])).flatten().tolist() == [0, 10, 20, 30, 4, 5]
    assert x.flatten().tolist() == [0, 1, 2, 3, 4, 5], "the original is left alone"


def test_the_last_active_one_by_hand():
    active = torch.tensor([[False, True, False, True], [False, False, True, False]])
    values = torch.tensor([[1.0], [2.0], [3.0]])
    assert last_active(values, active).flatten().tolist() == [0, 1, 1, 2, 0, 0, 3, 3]
    spare = torch.cat([values, torch.full((2, 1), torch.nan)])
    assert last_active(spare, active).equal(last_active(values, active)), "rows too many"
    assert last_active(values[:0], torch.zeros_like(active)).flatten().tolist() == [0] * 8


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_last_active_one_is_what_is_carried_on(share):
    dice = torch.Generator().manual_seed(0)
    active, values = torch.rand(3, 17, generator=dice) < share, torch.randn(3, 17, 5, generator=dice)
    carried = carry_on(torch.where(active[..., None], values, 0.0), ~active)
    assert torch.equal(last_active(take(values, compact(active)), active), carried)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_put_takes_back_what_take_took(share):
    dice = torch.Generator().manual_seed(0)
    x, active = torch.randn(3, 7, 5, generator=dice), torch.rand(3, 7, generator=dice) < share
    rows = compact(active)
    assert torch.equal(put(x, rows, take(x, rows)), x)
    poisoned = put(torch.full_like(x, torch.nan), rows, take(x, rows))
    assert torch.equal(poisoned[active], x[active])
    assert poisoned[~active].isnan().all()


# --- rows of a known number, with a gradient --------------------------------------------------------------------------

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def test_chosen_rows_by_hand():
    rows = ChosenRows.at(torch.tensor([2, 0]), tokens=3)
    assert rows.rank.tolist() == [1, 2, 0]
    assert rows.chosen.tolist() == [True, False, True]
    assert rows.take(X).tolist() == [[5.0, 6.0], [1.0, 2.0]]
    assert rows.spread(rows.take(X)).tolist() == [[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]]
    assert rows.take(X[:, 0]).tolist() == [5.0, 1.0]


def test_what_is_not_finite_stays_in_its_row():
    rows = ChosenRows.at(torch.tensor([1]), tokens=3)
    assert rows.spread(torch.tensor([torch.nan])).nan_to_num(7.0).tolist() == [0.0, 7.0, 0.0]


def chosen_rows(tokens: int, n: int) -> ChosenRows:
    """In any order."""
    return ChosenRows.at(torch.randperm(tokens, generator=torch.Generator().manual_seed(n))[:n], tokens)


@pytest.mark.parametrize(("tokens", "n"), [(1, 0), (1, 1), (7, 0), (7, 1), (7, 4), (7, 7), (12, 5)])
def test_taking_and_spreading_are_each_others_gradient(tokens, n):
    rows, dice = chosen_rows(tokens, n), torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 3, dtype=torch.float64, generator=dice, requires_grad=True)
    values = torch.randn(n, 3, dtype=torch.float64, generator=dice, requires_grad=True)
    torch.testing.assert_close(rows.take(x), x[rows.places])
    torch.testing.assert_close(rows.spread(values), torch.zeros_like(x).index_copy(0, rows.places, values))
    if n:
        assert torch.autograd.gradcheck(rows.take, x)
        assert torch.autograd.gradcheck(rows.spread, values)


@pytest.mark.parametrize("shape", [(9,), (9, 4), (9, 2, 3)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 4, 9])
def test_the_gradient_is_that_of_the_librarys_gather(shape, n):
    rows, dice = chosen_rows(9, n), torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=dice, requires_grad=True)
    values, weight = torch.randn(2, n, *shape[1:], generator=dice)
    values.requires_grad_()
    for ours, library, leaf, grad in (
        (rows.take, lambda x: x.index_select(0, rows.places), x, weight),
        (rows.spread, lambda v: torch.zeros_like(x).index_copy(0, rows.places, v), values, torch.randn_like(x)),
    ):
        found, expected = (torch.autograd.grad(take(leaf), leaf, grad)[0] for take in (ours, library))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_keeps_the_precision(dtype):
    x = torch.zeros(4, 2, dtype=dtype, requires_grad=True)
    ChosenRows.at(torch.tensor([3, 1]), tokens=4).take(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


# --- products ---------------------------------------------------------------------------------------------------------


def operands(size: tuple[int, ...], share: float | None, *, bias: bool, spoilt: bool = True) -> list:
    """x, weight, bias and the active tokens (one if `share` is None); `spoilt`: NaN in the rows of the others."""
    batch, time, d, out = size
    dice = torch.Generator().manual_seed(0)
    x, weight = torch.randn(batch, time, d, generator=dice), torch.randn(out, d, generator=dice) / d**0.5
    b = torch.randn(out, generator=dice) if bias else None
    active = torch.rand(batch, time, generator=dice) < (share or 0.0)
    if share is None:
        active.view(-1)[active.numel() // 2 :][:1] = True
    return [x.masked_fill(~active[..., None], torch.nan) if spoilt else x, weight, b, active]


def cast(arguments: Sequence[Tensor | None], dtype: torch.dtype, device: str = "cpu") -> list:
    return [x if x is None else x.to(device, dtype if x.is_floating_point() else x.dtype) for x in arguments]


def listing(active: Tensor) -> Listed:
    """As a kernel makes it, with invalid places after the last."""
    listed = decide(-active.float(), 0.5, backend="reference").listed
    assert listed is not None
    return listed


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_the_eager_product_equals_the_reference(name, share, bias):
    given = cast(operands(SIZES[name], SHARES[share], bias=bias), torch.float64)
    expected = product_of_rows(*given, backend="reference")
    found = product_of_rows(*given, backend="eager")
    assert found.shape == (*SIZES[name][:2], SIZES[name][3])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[~given[3]], torch.zeros_like(found[~given[3]])), "zero where a token is not active"
    assert torch.equal(product_of_rows(*given, listing(given[3]), backend="eager"), found)
    assert torch.equal(product_of_rows(*given), found), "on a CPU auto is eager"


def test_the_product_by_hand():
    x, active = torch.tensor([[[1.0, 2.0], [torch.nan, 0.0], [3.0, 4.0]]]), torch.tensor([[True, False, True]])
    weight, bias = torch.tensor([[1.0, 10.0], [0.0, -1.0]]), torch.tensor([0.5, 0.25])
    for backend in ("reference", "eager"):
        found = product_of_rows(x, weight, bias, active, backend=backend)
        assert found.tolist() == [[[21.5, -1.75], [0.0, 0.0], [43.5, -3.75]]]


@pytest.mark.parametrize("share", ["one", "some", "all"])
def test_the_products_gradient_equals_the_references(share):
    *given, active = cast(operands(SIZES["ragged"], SHARES[share], bias=True, spoilt=False), torch.float64)
    leaves = [x.requires_grad_() for x in given]
    grad = torch.randn(2, 19, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = (
        torch.autograd.grad(product_of_rows(*leaves, active, backend=backend), leaves, grad)
        for backend in ("eager", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        product_of_rows(*operands(SIZES["one token"], 1.0, bias=False), backend="fast")


def test_auto_is_the_kernel_for_low_precision_on_a_gpu_without_a_gradient(kernels_on_a_gpu, monkeypatch):
    def launched(dtype: torch.dtype, listed: bool = False) -> list[str]:
        def run(x: Tensor, *rest: Any) -> None:
            y = product_of_rows(x, *rest)
            assert y == "eager" or (y.shape, y.dtype, y.is_cuda) == ((2, 19, 40), dtype, True)

        given = cast(operands(SIZES["ragged"], 0.4, bias=True), dtype)
        return kernels_on_a_gpu(run, *given, listing(given[3]) if listed else None)

    # It would count the active rows, which is impossible with fake tensors.
    monkeypatch.setattr("tokendepth.ops.rows.eager.product", lambda *_: "eager")
    with torch.no_grad():
        assert launched(torch.bfloat16) == ["list_active", "product_of_rows"]
        assert launched(torch.float16, listed=True) == ["product_of_rows"], "what is listed is not listed again"
        assert launched(torch.float32) == []
    assert launched(torch.bfloat16) == []


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """For each case: the errors of kernel and library, and whether the kernel's inactive rows are zero."""
    assert len(measured) == len(MEASURED) * len(SHARES) * 2
    wrong = {
        case: found
        for case, found in measured.items()
        # The error of a sum of this many terms with random rounding, since the library's own error may be 0.
        if not found["kernel"] <= 2 * found["library"] + MEASURED[case.split(", ")[0]][2] ** 0.5 * ROUNDING
        or not found["zeros"]
    }
    assert wrong == {}


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.cpu().double() - exact).norm() / (exact.norm() or 1.0))


def _measure() -> None:
    """Print one JSON object: for every case, what `test_kernel` checks."""
    from tokendepth.ops.rows.kernel import _product

    on_gpu = torch.cuda.is_available()
    to = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    found = {}
    for name, size in MEASURED.items():
        for share, number in SHARES.items():
            for way in ("flags, no bias", "list, bias, a view"):
                given = operands(size, number, bias="no bias" not in way)
                exact = product_of_rows(*cast(given, torch.float64), backend="reference")
                x, *rest = cast(given, *to)
                listed = None
                if "list" in way:
                    x, listed = x.transpose(0, 1).contiguous().transpose(0, 1), Listed(*cast(listing(given[3]), *to))
                with torch.no_grad():
                    kernel = product_of_rows(x, *rest, listed, backend="kernel")
                    library = product_of_rows(x, *rest, backend="eager")
                found[f"{name}, {share}, by {way}"] = {
                    "kernel": error(kernel, exact),
                    "library": error(library, exact),
                    "zeros": not kernel[~rest[-1]].any(),
                }
    given = cast(operands(SIZES["ragged"], 0.4, bias=True), *to)
    arguments = (*given[:3], *cast(listing(given[3].cpu()), *to))
    torch.library.opcheck(_product, arguments, test_utils=("test_schema", "test_faketensor"))
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
