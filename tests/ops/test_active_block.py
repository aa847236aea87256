"""A block for its active tokens: eager and kernel against the reference in float64.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, in bfloat16.
"""

import json
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tokendepth.ops.active_block import BlockWeights, active_block, fits_tiles
from tokendepth.ops.backend import fits_one_tile
from tokendepth.ops.choose import choose
from tokendepth.ops.chosen_block import chosen_block, everybodys_block

ROUNDING = 2.0**-24  # of a float32: what twice an error of nothing still allows

# batch, time, d, heads, ff, keys. Rows in one tile (d a power of two up to 256) and not; a cache; widths that are no
# powers of two; more rows than a block of them.
SIZES = {
    "one token": (1, 1, 32, 2, 16, 1),
    "one tile": (2, 19, 32, 2, 48, 19),
    "several": (2, 19, 48, 3, 100, 19),
    "a cache": (3, 5, 64, 2, 64, 21),
    "a cache, wide": (3, 7, 72, 3, 72, 30),
    "blocks of rows": (2, 150, 32, 2, 32, 150),
}
ON_A_GPU = {"the paper's": (8, 256, 256, 8, 1024, 256), "GPT-2's": (4, 512, 768, 12, 3072, 512)}
MEASURED = {**SIZES, **(ON_A_GPU if torch.cuda.is_available() else {})}
SHARES = {"none": 0.0, "some": 0.4, "all": 1.0}


def operands(size: tuple[int, ...], share: float, *, halting: bool, valid: bool, seed: int = 0) -> list:
    batch, time, d, heads, ff, keys = size
    dice = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    shapes = ((d, d), (d, d), (d,), (d,), (ff, d), (ff,), (d, ff), (d,))
    weights = BlockWeights(*(random(*shape) / shape[-1] ** 0.5 for shape in shapes))
    both = random(batch, keys, 2, heads, d // heads)
    k, v = (both[:, :, part].transpose(1, 2) for part in (0, 1))
    active = torch.rand(batch, time, generator=dice) < share
    halt = random(batch, time) if halting else None
    key_valid = torch.rand(batch, keys, generator=dice) < 0.7 if valid else None
    return [random(batch, time, d), random(batch, time, d), k, v, active, weights, halt, key_valid]


def cast(arguments: list, dtype: torch.dtype, device: str = "cpu") -> list:
    def one(x):
        if isinstance(x, BlockWeights):
            return BlockWeights(*map(one, x))
        return x if x is None else x.to(device, dtype if x.is_floating_point() else x.dtype)

    return [one(x) for x in arguments]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("halting", [False, True])
@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_eager_equals_reference(name, share, halting, valid):
    arguments = cast(operands(SIZES[name], share, halting=halting, valid=valid), torch.float64)
    expected = active_block(*arguments, backend="reference")
    found = active_block(*arguments, backend="eager")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    h, active = arguments[0], arguments[4]
    assert torch.equal(found[~active], h[~active]), "what is not active is not touched"
    with torch.no_grad():
        in_place = active_block(*arguments, backend="eager")
    assert in_place is h, "without a gradient there is no copy"
    torch.testing.assert_close(in_place, expected, rtol=1e-10, atol=1e-10)


def test_on_a_cpu_auto_is_eager_and_an_unknown_backend_is_refused():
    arguments = operands(SIZES["one tile"], 0.4, halting=True, valid=False)
    assert torch.equal(active_block(*arguments), active_block(*arguments, backend="eager"))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        active_block(*arguments, backend="fast")


def test_heads_too_narrow_for_tensor_cores_are_the_librarys():
    narrow = operands((1, 2, 64, 8, 64, 2), 1.0, halting=False, valid=False)
    weights = narrow[5]
    assert fits_tiles(weights, heads=4)
    assert not fits_tiles(weights, heads=8)
    if find_spec("triton") is not None:
        with pytest.raises(ValueError, match="at least 16 numbers, not 8"):
            active_block(*narrow, backend="kernel")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MEASURED)
def test_the_kernel_errs_at_most_twice_as_much_as_the_library(measured, name, share):
    for case in measured[f"{name}, {share}"]:
        assert case["untouched"], case
        assert case["kernel"] <= 2 * case["library"] + ROUNDING, case


@pytest.mark.parametrize("name", MEASURED)
def test_who_decides_in_the_kernel_does_the_same(measured, name):
    for case in measured[f"{name}, undecided"]:
        assert case["decided"], case
        assert case["kernel"] <= 2 * case["library"] + ROUNDING, case


def _undecided(size: tuple[int, ...], device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The same, where the kernel decides who is active: by a number, a tensor of one, or one a token."""
    found = []
    for kind, share, valid in (("number", 0.4, True), ("one", 0.0, False), ("one", 1.0, True), ("tokens", 0.4, True)):
        given = operands(size, share, halting=True, valid=True)
        dice = torch.Generator().manual_seed(1)
        logit = torch.randn(given[4].shape, generator=dice)
        choosable = torch.rand(logit.shape, generator=dice) < 0.8 if valid else None
        level = float((-logit).flatten().sort().values[round((1 - share) * (logit.numel() - 1))])
        threshold: Any = level if kind == "number" else torch.tensor(level).to(device)
        if kind == "one":  # nobody, or everybody who may be
            threshold = torch.tensor(torch.inf if share == 0 else -torch.inf).to(device)
        if kind == "tokens":
            threshold = torch.where(torch.rand(logit.shape, generator=dice) < share, -torch.inf, torch.inf).to(device)
        cpu = threshold.cpu() if isinstance(threshold, torch.Tensor) else threshold
        expected = choose(logit, cpu, choosable, inclusive=kind == "number", backend="reference").active
        h, x, k, v, _, weights, halt, key_valid = cast(given, torch.float64)
        exact = active_block(h, x, k, v, expected, weights, halt, key_valid, backend="reference")
        h, x, k, v, _, weights, halt, key_valid = cast(given, dtype, device)
        decision = logit.to(device), threshold
        with torch.no_grad():
            kernel, active = chosen_block(
                h.clone(), x, k, v, *decision, weights, halt, None if choosable is None else choosable.to(device),
                key_valid, inclusive=kind == "number", backend="kernel",
            )  # fmt: skip
            library = active_block(h.clone(), x, k, v, expected.to(device), weights, halt, key_valid, backend="eager")
        case = {"kind": kind, "share": share, "decided": bool(torch.equal(active.cpu(), expected))}
        found.append({**case, "kernel": error(kernel, exact), "library": error(library, exact)})
    return found


def _registered_as_it_is(device: str) -> None:
    """Its schema says what it changes, and its shapes are known without running it."""
    from tokendepth.ops.active_block.kernel import _chosen_block

    given = operands(SIZES["one tile"], 0.4, halting=True, valid=True)
    h, x, k, v, _, weights, halt, key_valid = cast(given, torch.bfloat16 if device == "cuda" else torch.float32, device)
    logit = torch.zeros(h.shape[:2], device=device)
    arguments = (h, x, k, v, logit, None, 0.0, True, None, *weights, halt, key_valid)
    torch.library.opcheck(_chosen_block, arguments, test_utils=("test_schema", "test_faketensor"))


def _everybody(size: tuple[int, ...], device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The same with nothing to decide: all are active."""
    given = operands(size, 1.0, halting=False, valid=True)
    exact = active_block(*cast(given, torch.float64), backend="reference")
    h, x, k, v, active, weights, _, key_valid = cast(given, dtype, device)
    with torch.no_grad():
        kernel = everybodys_block(h.clone(), x, k, v, weights, key_valid)
        library = active_block(h.clone(), x, k, v, active, weights, None, key_valid, backend="eager")
    return [{"decided": True, "kernel": error(kernel, exact), "library": error(library, exact)}]


def _measure() -> None:
    """Print one JSON object: the errors of kernel and library for every case."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    found: dict[str, list] = {}
    _registered_as_it_is(device)
    for name, size in MEASURED.items():
        for share, number in SHARES.items():
            for halting, valid in ((False, False), (True, True)):
                given = operands(size, number, halting=halting, valid=valid)
                exact = active_block(*cast(given, torch.float64), backend="reference")
                arguments = cast(given, torch.bfloat16 if on_gpu else torch.float32, device)
                with torch.no_grad():
                    h, *rest = arguments
                    kernel, library = (active_block(h.clone(), *rest, backend=b) for b in ("kernel", "eager"))
                active = arguments[4]
                case = {"halting": halting, "valid": valid, "kernel": error(kernel, exact)}
                case["library"] = error(library, exact)
                case["untouched"] = bool(torch.equal(kernel[~active], h[~active]))
                found.setdefault(f"{name}, {share}", []).append(case)
        how = device, torch.bfloat16 if on_gpu else torch.float32
        found[f"{name}, undecided"] = _undecided(size, *how)
        if fits_one_tile(size[2]):
            found[f"{name}, undecided"] += _everybody(size, *how)
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
