"""carry_on: eager and kernel against the loop that defines it, in float64.

The kernel is measured in a subprocess, this file run as a script, as in test_router.py.
"""

import json

import pytest
import torch
from torch import Tensor

from tokendepth.ops.carry_on import carry_on
from tokendepth.ops.carry_on.eager import eager
from tokendepth.ops.carry_on.reference import reference

SIZES = {"one token": (1, 1, 1), "a tile": (2, 7, 5), "two tiles, two pieces": (1, 10, 5), "no tokens": (0, 4, 8)}
ON_A_GPU = {"a training step": (64, 256, 256), "long": (2, 1000, 40), "two tiles": (1, 66, 33)}
KINDS = ("numbers", "decisions", "numbers after others")
NAMES = ("carried", "grad of fresh", "grad of keep")
ROUNDING = 2.0**-24  # of a float32


def operands(size: tuple[int, int, int], kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    rng = torch.Generator().manual_seed(sum(size))
    fresh = torch.randn(size, generator=rng, dtype=torch.float64)
    keep = torch.rand(size[:2], generator=rng, dtype=torch.float64)
    before = torch.randn(size[0], size[2], generator=rng, dtype=torch.float64)
    return fresh, keep > 0.3 if kind == "decisions" else keep, before if kind == "numbers after others" else None


def derived(run, fresh: Tensor, keep: Tensor, before: Tensor | None, dtype: torch.dtype, device="cpu") -> list[Tensor]:
    """The result, and the gradients for fresh and, unless it is bool, for keep."""
    fresh = fresh.to(device, dtype).requires_grad_()
    keep = keep.to(device) if keep.dtype == torch.bool else keep.to(device, dtype).requires_grad_()
    out = run(fresh, keep, None if before is None else before.to(device, dtype))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [leaf for leaf in (fresh, keep) if leaf.requires_grad]
    grads = torch.autograd.grad((out * weight.to(device, dtype)).sum(), leaves, materialize_grads=True)
    assert {part.dtype for part in (out, *grads)} == {dtype}
    return [out.detach(), *grads]


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30))


@pytest.mark.parametrize("run", [reference, eager])
def test_by_hand(run):
    fresh = torch.tensor([[[1.0], [0.0], [4.0], [0.0], [8.0]]])
    keep = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.25]])
    assert run(fresh, keep).flatten().tolist() == [1, 1, 4, 4, 9]
    assert run(fresh, keep, torch.tensor([[2.0]])).flatten().tolist() == [3, 3, 4, 4, 9]
    assert run(fresh[:, :1], keep[:, :1], torch.tensor([[2.0]])).flatten().tolist() == [3]
    assert run(fresh, torch.tensor([[True, False, True, True, False]])).flatten().tolist() == [1, 0, 4, 4, 8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", [1, 2, 7, 8, 33])
def test_eager_is_the_loop(time, kind):
    given = operands((2, time, 3), kind)
    for a, b in zip(*(derived(run, *given, torch.float64) for run in (eager, reference)), strict=True):
        torch.testing.assert_close(a, b)


def test_backends_by_name(kernels_on_a_gpu):
    fresh, keep, before = operands((2, 7, 5), KINDS[2])
    assert before is not None
    fresh, keep, before = fresh.float(), keep.float(), before.float()
    assert carry_on(fresh, keep, before).equal(eager(fresh, keep, before)), "on a CPU auto is eager"
    assert carry_on(fresh, keep, before, backend="reference").equal(reference(fresh, keep, before))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        carry_on(fresh, keep, backend="fast")
    assert kernels_on_a_gpu(carry_on, fresh, keep, before) == ["carry_on"]


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """The script prints `[kernel's error, eager's]` for each case and output."""
    assert len(measured) == len(KINDS) * len(SIZES | ON_A_GPU if torch.cuda.is_available() else SIZES)
    too_large = {
        (case, name): pair
        for case, pairs in measured.items()
        for name, pair in zip(NAMES, pairs, strict=False)
        if not pair[0] <= 2 * pair[1] + 8 * ROUNDING
    }
    assert too_large == {}


def main() -> None:
    from tokendepth.ops.carry_on import kernel as module
    from tokendepth.ops.carry_on.kernel import kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":  # the interpreter works element by element
        module.BLOCK_T, module.BLOCK_D = 8, 4
    found = {}
    for name, size in (SIZES | ON_A_GPU if device == "cuda" else SIZES).items():
        for kind in KINDS:
            given = operands(size, kind)
            exact = derived(eager, *given, torch.float64)
            parts = (derived(run, *given, torch.float32, device) for run in (kernel, eager))
            found[f"{name}, {kind}"] = [[error(a, c), error(b, c)] for a, b, c in zip(*parts, exact, strict=True)]
    fresh, keep, _ = operands((2, 7, 5), "numbers")
    low = kernel(fresh.to(device, torch.bfloat16), keep.to(device))
    torch.testing.assert_close(low.cpu().double(), eager(fresh.bfloat16().double(), keep), rtol=0.01, atol=0.01)
    torch.library.opcheck(
        torch.ops.tokendepth.carry_on.default, (fresh.float().to(device), keep.float().to(device), None)
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
