"""What a block needs of every token: eager and kernel against the reference in float64.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, in bfloat16.
"""

import json

import pytest
import torch

from tokendepth.ops.enter_block import RouterWeights, enter_block

ROUNDING = 2.0**-24  # of a float32

# batch, time, d, out, the router's width. One row; fewer columns than a tile; more rows and columns than tiles; no rows
# at all; many rows.
SIZES = {
    "one": (1, 1, 16, 16, 16),
    "ragged": (2, 19, 32, 40, 20),
    "tiles": (2, 130, 64, 200, 16),
    "none": (0, 5, 16, 16, 16),
    "many": (5, 830, 16, 32, 16),
}
ON_A_GPU = {
    "the paper's": (64, 256, 256, 512, 64),
    "the paper's, batch 8": (8, 256, 256, 512, 64),
    "the paper's, batch 1": (1, 256, 256, 512, 64),
}
MEASURED = {**SIZES, **(ON_A_GPU if torch.cuda.is_available() else {})}
ROUTERS = {"no router": None, "of the state": False, "of the normalised state": True}


def operands(size: tuple[int, ...], normed: bool | None) -> list:
    batch, time, d, out, hidden = size
    dice = torch.Generator().manual_seed(0)
    shapes = ((batch, time, d), (d,), (d,), (out, d), (hidden, d), (hidden,), (1, hidden), (1,))
    h, norm, norm_bias, w, w1, b1, w2, b2 = (torch.randn(shape, generator=dice) for shape in shapes)
    router = None if normed is None else RouterWeights(w1 / d**0.5, b1, w2, b2, normed)
    return [3 * h + 1, norm, norm_bias, w / d**0.5, router]


def cast(arguments: list, dtype: torch.dtype, device: str = "cpu") -> list:
    *tensors, router = arguments
    moved = [x.to(device, dtype) for x in tensors]
    return [*moved, router and RouterWeights(*(w.to(device, dtype) for w in router[:4]), router.normed)]


def errors(found: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> list[float]:
    assert [x.shape for x in found] == [x.shape for x in exact]
    return [float((f.cpu().double() - e).norm() / (e.norm() or 1.0)) for f, e in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("backend", "router"),
    [*(("eager", router) for router in ROUTERS), *(("joined", router) for router in ROUTERS if router != "no router")],
)
@pytest.mark.parametrize("name", SIZES)
def test_library_calls_equal_the_reference(name, backend, router):
    normed = ROUTERS[router]
    given = cast(operands(SIZES[name], normed), torch.float64)
    found, expected = (enter_block(*given, backend=backend) for backend in (backend, "reference"))
    assert max(errors(found, expected)) < 1e-12
    assert found.logit.shape == (given[0].shape[:-1] if normed is not None else (0,))
    low = enter_block(*cast(operands(SIZES[name], normed), torch.bfloat16), backend=backend)
    assert (low.both.dtype, low.logit.dtype) == (torch.bfloat16, torch.float32)


def test_one_product_errs_at_most_twice_as_much_as_three():
    given = operands(SIZES["tiles"], normed=False)
    given[0] = given[0] + 30  # a mean that is large beside the deviation
    exact = enter_block(*cast(given, torch.float64), backend="reference")
    one, three = (errors(enter_block(*given, backend=backend), exact) for backend in ("joined", "eager"))
    assert all(a <= 2 * b for a, b in zip(one, three, strict=True)), (one, three)


def test_by_hand():
    h = torch.tensor([[1.0, 3.0]])  # mean 2, deviation 1
    weights = torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.5]), torch.tensor([[1.0, 2.0]])
    router = [torch.tensor(w) for w in ([[1.0, 2.0], [1.0, 0.0]], [0.5, -4.0], [[2.0, 5.0]], [0.25])]
    x, both, logit = enter_block(h, *weights, RouterWeights(*router))
    torch.testing.assert_close(x, torch.tensor([[-2.0, 1.5]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(both, torch.tensor([[1.0]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(logit, torch.tensor([2 * (1 + 6 + 0.5) + 0.25]))  # the second unit is below 0
    normed = enter_block(h, *weights, RouterWeights(*router, normed=True)).logit
    torch.testing.assert_close(normed, torch.tensor([2 * (-1 + 2 + 0.5) + 0.25]), atol=1e-3, rtol=0)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        enter_block(*operands(SIZES["one"], None), backend="fast")


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", MEASURED)
def test_the_kernel_errs_at_most_twice_as_much_as_the_library(measured, name, router):
    lucky = (
        MEASURED[name][2] ** 0.5 * ROUNDING
    )  # a sum of so many terms, each rounded at random; one may err by nothing
    case = measured[f"{name}, {router}"]
    for kernel, library in zip(case["kernel"], case["library"], strict=True):
        assert kernel <= 2 * library + lucky, case


def _measure() -> None:
    """Print one JSON object: the errors of kernel and library for every case."""
    on_gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    cases = {
        f"{name}, {router}": operands(size, normed)
        for name, size in MEASURED.items()
        for router, normed in ROUTERS.items()
    }
    found = {}
    for name, given in cases.items():
        dtype, device = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
        exact = enter_block(*cast(given, torch.float64), backend="reference")
        arguments = cast(given, dtype, device)
        with torch.no_grad():
            kernel, library = (enter_block(*arguments, backend=backend) for backend in ("kernel", "eager"))
        found[name] = {"kernel": errors(kernel, exact), "library": errors(library, exact)}
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
