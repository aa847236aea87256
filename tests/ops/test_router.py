"""The router's halting logit: eager and kernel against the reference in float64.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, bfloat16 too.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tokendepth.ops.router import halting_logits
from tokendepth.ops.router.eager import eager
from tokendepth.ops.router.reference import reference

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("logits", "h", "w1", "b1", "w2", "b2")
ROUNDING = 2.0**-24  # of a float32

# Shape of h and hidden. One row and several, several row blocks per program, several pieces of d; no powers of two.
SIZES = {
    "one token": ((1, 32), 16),
    "five tokens": ((5, 48), 17),
    "batch and time": ((3, 11, 100), 24),
    "the usual": ((2, 35, 256), 64),
    "wide h": ((20, 768), 24),
    "wide hidden": ((20, 100), 192),
    "blocks of rows": ((2100, 32), 16),
    "bfloat16 h": ((70, 100), 24),
    "rows apart": ((33, 48), 17),
    "columns apart": ((33, 48), 17),
    "time before batch": ((6, 9, 48), 17),
}
ON_A_GPU = {"a training step": ((8192, 256), 64), "wide": ((1000, 768), 192)}  # the interpreter would take a minute
CHECKS = ["no tokens", "an expanded gradient", "the same bits twice", "a NaN stays one", "compiled", "opcheck"]


def operands(shape: tuple[int, ...], hidden: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """h, w1, b1, w2, b2 with every pre-activation far from zero, so that rounding does not flip the relu."""
    random = torch.Generator().manual_seed(seed)
    d = shape[-1]
    w1 = torch.randn(hidden, d, generator=random) / d**0.5
    b1, w2, b2 = (torch.randn(size, generator=random) for size in ((hidden,), (1, hidden), (1,)))
    h = torch.randn(shape, generator=random)
    for _ in range(100):
        near = ((h.double() @ w1.double().T + b1.double()).abs() < 2e-5).any(-1)
        if not near.any():
            return h, w1, b1, w2, b2
        h[near] = torch.randn(h[near].shape, generator=random)
    raise AssertionError("no such h")


def derived(function, h, *weights, grad, low_precision=False, dtype=None) -> list[torch.Tensor]:
    """The logits and the gradients of the five operands."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (h, *weights)]
    logits = function(*leaves, low_precision)
    return [logits.detach(), *torch.autograd.grad(logits, leaves, grad.to(logits.dtype))]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm())


# --- reference and eager ----------------------------------------------------------------------------------------------


def test_reference_by_hand():
    h = torch.tensor([[1.0, 2.0], [-1.0, 0.5]])
    w1, b1 = torch.tensor([[1.0, 1.0], [-2.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 1.0, -1.0])
    w2, b2 = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([-1.0])
    assert reference(h, w1, b1, w2, b2).tolist() == [3 + 0 + 100 - 1, 0 + 30 + 0 - 1]


@pytest.mark.parametrize("name", ["one token", "five tokens", "batch and time", "the usual"])
def test_eager_equals_reference(name):
    h, *weights = operands(*SIZES[name])
    grad = torch.randn(h.shape[:-1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = derived(eager, h, *weights, grad=grad, dtype=torch.float64)
    expected = derived(reference, h, *weights, grad=grad, dtype=torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_eager_without_tokens():
    h, *weights = operands((2, 0, 48), 17)
    logits, grad_h, *grads = derived(eager, h, *weights, grad=torch.empty(2, 0))
    assert logits.shape == (2, 0)
    assert grad_h.shape == h.shape
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("h_dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_what_autocast_does(h_dtype):
    h, w1, b1, w2, b2 = operands((5, 48), 17)
    h = h.to(h_dtype)
    low = eager(h, w1, b1, w2, b2, low_precision=True)
    full = eager(h.float(), w1, b1, w2, b2)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = torch.relu(torch.nn.functional.linear(h, w1, b1))
        expected = torch.nn.functional.linear(hidden, w2, b2).squeeze(-1)
        inside = eager(h, w1, b1, w2, b2, low_precision=False)
    assert low.dtype == full.dtype == inside.dtype == torch.float32
    assert low.equal(expected.float())
    assert inside.equal(full), "the argument decides, not the surroundings"
    rounded_less = reference(h, w1, b1, w2, b2, low_precision=True)
    assert 0 < error(rounded_less, full.double()) < 2 * error(low, full.double())


def test_flops_of_eager():
    h, *weights = operands((3, 11, 100), 24)
    with FlopCounterMode(display=False) as counter:
        eager(h, *weights)
    assert counter.get_total_flops() == 3 * 11 * 2 * (24 * 100 + 24)


def test_backends_by_name():
    h, *weights = operands((5, 48), 17)
    assert halting_logits(h, *weights).equal(eager(h, *weights)), "on a CPU auto is eager"
    assert halting_logits(h, *weights, backend="reference").equal(reference(h, *weights))
    with pytest.raises(ValueError, match=r"unknown backend 'fast'.*kernel") as raised:
        halting_logits(h, *weights, backend="fast")
    assert "\n" not in str(raised.value)


def test_compiled_without_a_break():
    h, *weights = operands((5, 48), 17)
    compiled = torch.compile(halting_logits, fullgraph=True, backend="eager")
    assert compiled(h, *weights).equal(eager(h, *weights))


# --- kernel -----------------------------------------------------------------------------------------------------------


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="no kernel: triton is not installed (pip install 'tokendepth[kernels]')"
)


def test_auto_on_a_gpu_knows_what_the_kernel_is_good_at(kernels_on_a_gpu):
    def runs_the_kernel(d: int, hidden: int, low_precision: bool) -> bool:
        def run(*arguments: torch.Tensor) -> None:
            logits = halting_logits(*arguments, low_precision)
            assert (logits.shape, logits.dtype, logits.is_cuda) == ((2, 5), torch.float32, True)

        sizes = ((2, 5, d), (hidden, d), (hidden,), (1, hidden), (1,))
        return kernels_on_a_gpu(run, *map(torch.zeros, sizes)) == ["halting_logits"]

    assert runs_the_kernel(256, 64, True)
    assert runs_the_kernel(512, 128, True)
    assert not runs_the_kernel(768, 192, True)
    assert not runs_the_kernel(256, 64, False)


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """One test, so that the script runs once. It prints `[kernel's error, PyTorch's]` for each case and output."""
    assert len(measured) == (2 * len(SIZES | ON_A_GPU) if torch.cuda.is_available() else len(SIZES))
    assert all(set(errors) == set(NAMES) for errors in measured.values())
    terms = {case: (SIZES | ON_A_GPU)[case.rpartition(", ")[0]][0][-1] for case in measured}
    too_large = {
        f"{case}: {name}": (kernels, pytorchs)
        for case, errors in measured.items()
        for name, (kernels, pytorchs) in errors.items()
        # The error of a sum of this many terms with random rounding, since the library's own error may be 0.
        if not kernels <= 2 * pytorchs + terms[case] ** 0.5 * ROUNDING
    }
    assert too_large == {}


@needs_triton
def test_kernel_without_gpu_or_interpreter_says_so():
    code = """if True:
        import torch
        from tokendepth.ops.router import halting_logits
        halting_logits(*map(torch.ones, ((2, 32), (16, 32), 16, (1, 16), 1)), backend="kernel")
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ValueError: backend 'kernel' needs a GPU"), done.stderr


# --- the script -------------------------------------------------------------------------------------------------------


def measure(kernel, name: str, low_precision: bool, device: str) -> dict[str, tuple[float, float]]:
    shape, hidden = (SIZES | ON_A_GPU)[name]
    h, *weights = (x.to(device) for x in operands(shape, hidden))
    if name == "bfloat16 h":
        h = h.bfloat16()
    elif name == "rows apart":
        h = torch.cat([h, h], -1)[..., : shape[-1]]
    elif name == "columns apart":
        h = h.T.contiguous().T
    elif name == "time before batch":
        h = h.transpose(0, 1)
    grad = torch.randn(h.shape[:-1], generator=torch.Generator().manual_seed(1)).to(device)
    found = derived(kernel, h, *weights, grad=grad, low_precision=low_precision)
    pytorch = derived(eager, h, *weights, grad=grad, low_precision=low_precision)
    exact = derived(eager, h, *weights, grad=grad, dtype=torch.float64)
    assert [x.dtype for x in found] == [torch.float32, h.dtype] + [torch.float32] * 4
    if h.dtype == torch.bfloat16 and device == "cpu":
        # Triton's interpreter truncates to bfloat16 where a GPU rounds, with twice the error; so only a rough check.
        torch.testing.assert_close(found[1], pytorch[1])
        found[1] = pytorch[1]
    errors = [(error(a, c), error(b, c)) for a, b, c in zip(found, pytorch, exact, strict=True)]
    return dict(zip(NAMES, errors, strict=True))


def check(kernel, name: str, device: str) -> None:
    h, *weights = (x.to(device) for x in operands((0 if name == "no tokens" else 70, 48), 17))
    grad = torch.ones(len(h), device=device)
    leaves = [x.requires_grad_() for x in (h, *weights)]
    if name == "no tokens":
        logits, grad_h, *grads = derived(kernel, h, *weights, grad=grad)
        assert (logits.shape, grad_h.shape) == ((0,), (0, 48))
        assert [x.shape for x in grads] == [x.shape for x in weights]
        assert not any(x.any() for x in grads)
    elif name == "an expanded gradient":
        found = torch.autograd.grad(kernel(*leaves).sum(), leaves)
        for a, b in zip(found, torch.autograd.grad(eager(*leaves).sum(), leaves), strict=True):
            torch.testing.assert_close(a, b)
    elif name == "the same bits twice":
        once, again = (derived(kernel, h, *weights, grad=grad) for _ in range(2))
        assert all(a.equal(b) for a, b in zip(once, again, strict=True))
    elif name == "a NaN stays one":
        spoilt = h.detach().clone()
        spoilt[3, 5] = torch.nan
        assert kernel(spoilt, *weights).isnan().nonzero().tolist() == [[3]]
    elif name == "compiled":
        compiled = torch.compile(halting_logits, fullgraph=True, backend="aot_eager")
        found = compiled(*leaves, backend="kernel")
        assert found.equal(kernel(*leaves))
        plain = derived(kernel, h, *weights, grad=grad)[1:]
        assert all(a.equal(b) for a, b in zip(torch.autograd.grad(found, leaves, grad), plain, strict=True))
    elif name == "opcheck":
        torch.library.opcheck(torch.ops.tokendepth.halting_logits.default, (*leaves, False))
        constants = [x.detach() for x in leaves[:4]]
        torch.library.opcheck(torch.ops.tokendepth.halting_logits_backward.default, (grad, *constants, False))


def script() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    from tokendepth.ops.router.kernel import kernel

    # Fills what torch.empty returns with NaN, so that anything a kernel fails to write is noticed.
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1, device=device).new_empty(1000).isnan().all()
    for name in CHECKS:
        check(kernel, name, device)
    cases = [(name, low) for name in SIZES | ON_A_GPU for low in (False, True)]
    if device == "cpu":  # the interpreter's bfloat16 products are wrong
        cases = [(name, False) for name in SIZES]
    print(json.dumps({f"{name}, low_precision={low}": measure(kernel, name, low, device) for name, low in cases}))


if __name__ == "__main__":
    script()
