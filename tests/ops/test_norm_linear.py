"""A layer norm and the projection of what it returns: eager and kernel against the reference in float64.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, in bfloat16 too.
"""

import json

import pytest
import torch

from tokendepth.ops.norm_linear import norm_linear

ROUNDING = 2.0**-24  # of a float32: what twice an error of nothing still allows

# batch, time, d, out: a row, fewer columns than a tile, more rows and columns than tiles, no rows at all.
SIZES = {"one": (1, 1, 16, 16), "ragged": (2, 19, 32, 40), "tiles": (2, 130, 64, 200), "none": (0, 5, 16, 16)}
ON_A_GPU = {"the paper's": (64, 256, 256, 512), "the paper's, batch 1": (1, 256, 256, 512)}


def operands(size: tuple[int, ...]) -> list[torch.Tensor]:
    batch, time, d, out = size
    dice = torch.Generator().manual_seed(0)
    shapes = ((batch, time, d), (d,), (d,), (out, d))
    h, norm, norm_bias, w = (torch.randn(shape, generator=dice) for shape in shapes)
    return [3 * h + 1, norm, norm_bias, w / d**0.5]


def error(found: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> float:
    assert [x.shape for x in found] == [x.shape for x in exact]
    return max(float((f.cpu().double() - e).norm() / (e.norm() or 1.0)) for f, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("name", SIZES)
def test_eager_equals_reference(name):
    given = [x.double() for x in operands(SIZES[name])]
    assert error(norm_linear(*given, backend="eager"), norm_linear(*given, backend="reference")) < 1e-12


def test_by_hand():
    h = torch.tensor([[1.0, 3.0]])  # mean 2, deviation 1
    x, y = norm_linear(h, torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.5]), torch.tensor([[1.0, 2.0]]))
    torch.testing.assert_close(x, torch.tensor([[-2.0, 1.5]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(y, torch.tensor([[1.0]]), atol=1e-4, rtol=0)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        norm_linear(*operands(SIZES["one"]), backend="fast")


@pytest.mark.parametrize("name", SIZES)
def test_the_kernel_errs_at_most_twice_as_much_as_the_library(measured, name):
    for case in measured[name]:
        assert case["kernel"] <= 2 * case["library"] + ROUNDING, case


def _measure() -> None:
    """Print one JSON object: the errors of kernel and library for every case."""
    on_gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    found: dict[str, list] = {}
    for name, size in {**SIZES, **(ON_A_GPU if on_gpu else {})}.items():
        given = operands(size)
        exact = norm_linear(*(x.double() for x in given), backend="reference")
        for dtype in (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,):
            arguments = [x.to("cuda" if on_gpu else "cpu", dtype) for x in given]
            with torch.no_grad():
                errors = {b: error(norm_linear(*arguments, backend=b), exact) for b in ("kernel", "eager")}
            case = {"dtype": str(dtype), "kernel": errors["kernel"], "library": errors["eager"]}
            found.setdefault(name, []).append(case)
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
