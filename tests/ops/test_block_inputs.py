"""The inputs of a block: eager, joined and kernel against the reference in float64.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, in bfloat16.
"""

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs, NormWeights, RouterWeights, Threshold, block_inputs
from tokendepth.ops.decide import decide

ROUNDING = 2.0**-24  # of a float32

# batch, time, d, out, the router's width. One row; fewer columns than a tile; more rows and columns than a tile, for
# each tile size of the kernel; no rows at all.
SIZES = {
    "one": (1, 1, 16, 16, 16),
    "ragged": (2, 19, 32, 40, 20),
    "tiles": (2, 130, 64, 200, 16),
    "more rows": (3, 190, 32, 130, 24),
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
EPS = {"no router": 1e-5, "of the state": 0.3, "of the normalised state": 1e-2}
THRESHOLDS = ["a number", "a tensor", "one a token"]


def operands(
    size: tuple[int, ...], normed: bool | None, *, rms: bool = False, bias: bool = False, eps: float = 1e-5
) -> list:
    """h, norm, w_kv, b_kv, router and, with one, a threshold of zero."""
    batch, time, d, out, hidden = size
    dice = torch.Generator().manual_seed(0)
    shapes = ((batch, time, d), (d,), (d,), (out, d), (out,), (hidden, d), (hidden,), (1, hidden), (1,))
    h, scale, shift, w, b, w1, b1, w2, b2 = (torch.randn(shape, generator=dice) for shape in shapes)
    router = None if normed is None else RouterWeights(w1 / d**0.5, b1, w2, b2, normed)
    norm = NormWeights(scale, None if rms else shift, eps)
    return [3 * h + 1, norm, w / d**0.5, b if bias else None, router, router and Threshold(0.0)]


def cast(given: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    if isinstance(given, Tensor):
        return given.to(device, dtype if given.is_floating_point() else given.dtype)
    if isinstance(given, list):
        return [cast(one, dtype, device) for one in given]
    return type(given)(*(cast(one, dtype, device) for one in given)) if isinstance(given, tuple) else given


def tensors(found: BlockInputs) -> list[Tensor]:
    return [found.x, found.kv] + ([] if found.decision is None else [found.decision.logit])


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.cpu().double() - exact).norm() / (exact.norm() or 1.0))


def errors(found: BlockInputs, exact: BlockInputs) -> list[float]:
    return [error(f, e) for f, e in zip(tensors(found), tensors(exact), strict=True)]


@pytest.mark.parametrize(
    ("backend", "router"),
    [*(("eager", router) for router in ROUTERS), *(("joined", router) for router in ROUTERS if router != "no router")],
)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("name", SIZES)
def test_library_calls_equal_the_reference(name, rms, bias, eps, backend, router):
    given = operands(SIZES[name], ROUTERS[router], rms=rms, bias=bias, eps=eps)
    found, expected = (block_inputs(*cast(given, torch.float64), backend=backend) for backend in (backend, "reference"))
    assert max(errors(found, expected)) < 1e-10
    assert found.kv.shape == (*SIZES[name][:2], SIZES[name][3])
    low = block_inputs(*cast(given, torch.bfloat16), backend=backend)
    assert (low.x.dtype, low.kv.dtype) == (torch.bfloat16, torch.bfloat16)
    if router == "no router":
        assert found.decision is low.decision is None
    else:
        assert low.decision.logit.dtype == torch.float32
        assert torch.equal(found.decision.active, -found.decision.logit > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
def test_one_product_errs_at_most_twice_as_much_as_three(rms, normed, dtype):
    given = operands(SIZES["tiles"], normed, rms=rms, bias=True)
    given[0] = given[0] + 30  # a mean that is large compared with the deviation
    given = cast(given, dtype)
    exact = block_inputs(*cast(given, torch.float64), backend="reference")
    one, three = (errors(block_inputs(*given, backend=backend), exact) for backend in ("joined", "eager"))
    assert all(a <= 2 * b for a, b in zip(one, three, strict=True)), (one, three)


@pytest.mark.parametrize("backend", ["reference", "eager", "joined"])
def test_by_hand(backend):
    h = torch.tensor([[[1.0, 3.0]]])  # mean 2, deviation 1, mean square 5
    norm, w_kv = NormWeights(torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.5])), torch.tensor([[1.0, 2.0]])
    router = [torch.tensor(w) for w in ([[1.0, 2.0], [1.0, 0.0]], [0.5, -4.0], [[2.0, 5.0]], [0.25])]

    def close(found: Tensor, expected: list[float]) -> None:
        torch.testing.assert_close(found.flatten(), torch.tensor(expected), atol=1e-3, rtol=0)

    x, kv, decision, _ = block_inputs(h, norm, w_kv, None, RouterWeights(*router), Threshold(-16.0), backend)
    close(x, [-2.0, 1.5])
    close(kv, [1.0])
    close(decision.logit, [2 * (1 + 6 + 0.5) + 0.25])  # the second unit is below 0
    assert decision.active.tolist() == [[True]], "-15.25 is above -16"
    normed = RouterWeights(*router, normed=True)
    _, kv, decision, _ = block_inputs(h, norm, w_kv, torch.tensor([7.0]), normed, Threshold(-3.0), backend)
    close(kv, [8.0])
    close(decision.logit, [2 * (-1 + 2 + 0.5) + 0.25])
    assert decision.active.tolist() == [[False]], "-3.25 is not above -3"
    rms = NormWeights(norm.scale, None, eps=4.0)  # the root of 5 + 4 is 3
    x, kv, decision, _ = block_inputs(h, rms, w_kv, None, normed, Threshold(0.0), backend)
    close(x, [2 / 3, 1.0])
    close(kv, [2 / 3 + 2])
    close(decision.logit, [2 * (1 / 3 + 2 + 0.5) + 0.25])


@pytest.mark.parametrize("backend", ["reference", "eager", "joined"])
@pytest.mark.parametrize("kind", THRESHOLDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_the_decision_is_that_of_decide(backend, kind, padded, inclusive):
    given = operands(SIZES["ragged"], False)
    logit = block_inputs(*given, backend=backend).decision.logit
    threshold = threshold_at(logit, kind, padded=padded, inclusive=inclusive)
    found = block_inputs(*given[:-1], threshold, backend=backend).decision
    expected = decide(logit, *threshold[:2], inclusive=inclusive, backend="reference").active
    assert 0 < expected.sum() < expected.numel()
    assert torch.equal(found.active, expected)
    assert torch.equal(found.logit, logit)
    assert torch.equal(found.kept(), torch.sigmoid(-logit))


def threshold_at(logit: Tensor, kind: str, *, padded: bool, inclusive: bool) -> Threshold:
    """Exactly the score of some tokens, so that it matters whether the threshold is inclusive."""
    dice = torch.Generator().manual_seed(1)
    score = -logit.cpu()
    value: Any = score.flatten().median()
    if kind == "one a token":
        value = torch.where(torch.rand(score.shape, generator=dice) < 0.5, score, score.flip(1))
    if kind == "a number":
        value = float(value)
    valid = torch.rand(score.shape, generator=dice) < 0.7 if padded else None
    return Threshold(*cast([value, valid], torch.float32, str(logit.device)), inclusive)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"unknown backend 'fast'.*joined"):
        block_inputs(*operands(SIZES["one"], None), backend="fast")


def test_the_kernel_refuses_what_it_does_not_know():
    pytest.importorskip("triton")
    wide, one = operands((1, 1, 48, 16, 16), None), SIZES["one"]
    for given in (wide, operands(one, None, rms=True), operands(one, None, bias=True)):
        with pytest.raises(ValueError, match="use 'eager'"):
            block_inputs(*given, backend="kernel")


@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_auto_is_the_kernel_for_what_it_knows(kernels_on_a_gpu, router):
    def launched(d: int, dtype: torch.dtype = torch.bfloat16, **kind: Any) -> list[str]:
        def run(*arguments: Any) -> None:
            found = block_inputs(*arguments)
            assert (found.x.shape, found.kv.shape, found.kv.dtype) == ((2, 5, d), (2, 5, 40), dtype)
            if found.decision is not None:
                assert found.decision.active.dtype == torch.bool
                assert {part.shape for part in (*found.decision[:2], found.decision.kept())} == {(2, 5)}

        return kernels_on_a_gpu(run, *cast(operands((2, 5, d, 40, 16), ROUTERS[router], **kind), dtype))

    assert launched(64) == ["block_inputs"]
    apart = [] if router == "no router" else ["halting_logits", "decide"]
    assert launched(48) == launched(512) == launched(64, rms=True) == launched(64, bias=True) == apart
    assert launched(64, torch.float32) == []


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """For each case: the errors of kernel and library, and whether the kernel decides as `decide` on its logits."""
    wrong = {}
    assert set(measured) == {f"{name}, {router}" for name in MEASURED for router in ROUTERS} | set(decisions())
    for case, found in measured.items():
        # The error of a sum of this many terms with random rounding, since the library's own error may be 0.
        lucky = MEASURED[found["size"]][2] ** 0.5 * ROUNDING
        right = all(k <= 2 * e + lucky for k, e in zip(found["kernel"], found["library"], strict=True))
        if not right or not found["decided"]:
            wrong[case] = found
    assert wrong == {}


def decisions() -> dict[str, tuple[str, str, bool, bool]]:
    """Size, kind of threshold, inclusive, padded."""
    ways = [("ragged", *way) for way in product(THRESHOLDS, (False, True), (False, True))]
    return {", ".join(map(str, way)): way for way in [*ways, ("more rows", "one a token", True, True)]}


def _measure() -> None:
    """Print one JSON object: for every case, what `test_kernel` checks."""
    from tokendepth.ops.block_inputs.kernel import _inputs

    to = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    found = {}
    with torch.no_grad():
        for (name, size), (router, normed) in product(MEASURED.items(), ROUTERS.items()):
            given = operands(size, normed, eps=EPS[router])
            exact = block_inputs(*cast(given, torch.float64), backend="reference")
            kernel, library = (block_inputs(*cast(given, *to), backend=backend) for backend in ("kernel", "eager"))
            case = {"size": name, "kernel": errors(kernel, exact), "library": errors(library, exact)}
            found[f"{name}, {router}"] = {**case, "decided": normed is None or decided_well(kernel, given[-1])}
        for case, (name, kind, inclusive, padded) in decisions().items():
            given = cast(operands(SIZES[name], inclusive), *to)
            logit = block_inputs(*given, backend="kernel").decision.logit
            threshold = threshold_at(logit, kind, padded=padded, inclusive=inclusive)
            own = block_inputs(*given[:-1], threshold, backend="kernel")
            same = torch.equal(own.decision.logit, logit) and 0 < own.decision.active.sum() < logit.numel()
            kept = torch.sigmoid(-logit.double()).cpu()
            found[case] = {
                "size": name,
                "kernel": [error(own.decision.keep, kept)],
                "library": [error(torch.sigmoid(-logit), kept)],
                "decided": bool(same) and decided_well(own, threshold),
            }
    h, norm, w_kv, _, router, _ = cast(operands(SIZES["ragged"], True), *to)
    arguments = (h, *norm, w_kv, list(router[:4]), True, None, 0.5, None, True)
    torch.library.opcheck(_inputs, arguments, test_utils=("test_schema", "test_faketensor"))
    print(json.dumps(found))


def decided_well(found: BlockInputs, threshold: Threshold) -> bool:
    """Whether the decision is that of `decide` on the same logits."""
    decision, (value, valid, inclusive) = found.decision, cast(threshold, torch.float32)
    assert decision is not None
    expected = decide(decision.logit.cpu(), value, valid, inclusive=inclusive, backend="reference").active
    return torch.equal(decision.active.cpu(), expected)


if __name__ == "__main__":
    _measure()
