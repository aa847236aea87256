"""Which tokens are active, and the list of them: eager and kernel against the reference, token by token.

The kernel runs in one subprocess, this file run as a script: Triton's interpreter has to be chosen before Triton is
imported. On a GPU the same script runs the real kernel.
"""

import json
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tokendepth.ops.decide import Decision, decide, list_active
from tokendepth.ops.rows import Listed

SIZES = {"one token": (1, 1), "a sequence": (1, 37), "several": (5, 19), "blocks": (3, 1030), "none": (0, 4)}
LONG = {"many sequences": (9, 1030)}  # more tokens before the last sequence than are counted at once
ON_A_GPU = {"the paper's": (64, 256), "GPT-2's": (16, 1024)}  # the interpreter would take a minute
THRESHOLDS = ["a number", "a tensor", "one a token", "nobody", "everybody"]


def cases() -> dict[str, tuple[tuple[int, int], str, bool, bool]]:
    """Size, kind of threshold, inclusive, padded."""
    sizes = {**SIZES, **LONG, **(ON_A_GPU if torch.cuda.is_available() else {})}
    ways = [*product(sizes.keys() - LONG, THRESHOLDS, (False, True), (False, True))]
    ways += [(name, "one a token", True, True) for name in LONG]
    return {", ".join(map(str, way)): (sizes[way[0]], *way[1:]) for way in ways}


def operands(size: tuple[int, int], kind: str, *, padded: bool) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Logits, some of which are exactly at the threshold."""
    dice = torch.Generator().manual_seed(0)
    logit = torch.randint(-3, 4, size, generator=dice) / 2
    threshold = {"a number": 0.5, "a tensor": torch.tensor(-0.5), "nobody": math.inf, "everybody": -math.inf}
    given = torch.randint(-3, 4, size, generator=dice) / 2 if kind == "one a token" else threshold[kind]
    valid = torch.rand(size, generator=dice) < 0.7
    return logit, given, valid if padded else None


@pytest.mark.parametrize("kind", THRESHOLDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_eager_decides_as_the_reference_does(name, kind, inclusive, padded):
    given = operands(SIZES[name], kind, padded=padded)
    expected = decide(*given, inclusive=inclusive, backend="reference")
    found = decide(*given, inclusive=inclusive)
    assert torch.equal(found.active, expected.active)
    assert found.active.dtype == torch.bool
    assert found.listed is None, "library products take rows, which `compact` finds"
    for decision in (found, expected):
        assert decision.logit is given[0]
        assert decision.keep is None
    places, starts = expected.listed
    assert places.dtype == starts.dtype == torch.int32
    assert len(places) == given[0].numel()
    assert places[: starts[-1]].tolist() == expected.active.flatten().nonzero().flatten().tolist()
    assert starts.tolist() == [0, *expected.active.sum(1).cumsum(0).tolist()]


def test_by_hand():
    logit = torch.tensor([[0.5, -0.5, -2.0], [-0.5, -1.0, 3.0]])  # scores: their negatives
    valid = torch.tensor([[True, True, False], [True, True, True]])
    for backend in ("reference", "eager"):
        assert decide(logit, 0.5, backend=backend).active.tolist() == [[False, False, True], [False, True, False]]
        found = decide(logit, 0.5, valid, inclusive=True, backend=backend).active
        assert found.tolist() == [[False, True, False], [True, True, False]]
        own = torch.tensor([[-1.0, -1.0, -1.0], [2.0, 2.0, -4.0]])
        assert decide(logit, own, backend=backend).active.tolist() == [[True, True, True], [False, False, True]]
    places, starts = decide(logit, 0.5, backend="reference").listed
    assert places.tolist() == [2, 4, -1, -1, -1, -1]
    assert starts.tolist() == [0, 1, 2]


def test_what_is_kept_is_the_sigmoid_or_what_a_kernel_made_of_it():
    logit = torch.tensor([[-2.0, 0.0, 3.0]])
    expected = [1 / (1 + math.exp(value)) for value in (-2.0, 0.0, 3.0)]
    assert decide(logit, 0.0).kept()[0].tolist() == pytest.approx(expected)
    made = torch.tensor([[0.1, 0.2, 0.3]])
    assert Decision(logit < 0, logit, keep=made).kept() is made


def test_a_logit_that_is_no_number_is_not_active():
    nan = torch.full((1, 2), math.nan)
    for backend in ("eager", "reference"):
        assert not decide(nan, -math.inf, backend=backend).active.any()
        assert not decide(nan, -math.inf, inclusive=True, backend=backend).active.any()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        decide(torch.zeros(1, 1), 0.0, backend="fast")


def test_where_kernels_do_not_serve_nothing_is_listed():
    assert list_active(torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, 16)) is None


def test_auto_is_the_kernel_where_kernels_serve_the_states(kernels_on_a_gpu):
    def run(logit: Tensor, states: Tensor | None) -> None:
        found = decide(logit, 0.0, states=states)
        assert (found.active.shape, found.active.dtype) == ((2, 5), torch.bool)
        for made in (found.listed, None if states is None else list_active(found.active, states)):
            assert made is None or (type(made), made.places.shape, made.starts.shape) == (Listed, (10,), (3,))

    logit, states = torch.zeros(2, 5), torch.zeros(2, 5, 16)
    with torch.no_grad():
        assert kernels_on_a_gpu(run, logit, states.bfloat16()) == ["decide", "list_active"]
        assert kernels_on_a_gpu(run, logit, states) == kernels_on_a_gpu(run, logit, None) == []
    assert kernels_on_a_gpu(run, logit, states.bfloat16()) == []


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """Whether the kernel decides and lists as the reference does, also when given flags."""
    assert set(measured) == {*cases(), "no number"}
    assert [case for case, same in measured.items() if not same] == []


def _measure() -> None:
    """Print one JSON object: for every case, what `test_kernel` checks."""
    from tokendepth.ops.decide.kernel import _decide, list_active

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds invalid places

    def on_device(given: Any) -> Any:
        return given.to(device) if isinstance(given, Tensor) else given

    found = {}
    for name, (size, kind, inclusive, padded) in cases().items():
        given = operands(size, kind, padded=padded)
        active, _, _, made = decide(*given, inclusive=inclusive, backend="reference")
        own = decide(*map(on_device, given), inclusive=inclusive, backend="kernel")
        assert made is not None
        assert type(own.listed) is Listed
        count = int(made.starts[-1])
        same = torch.equal(own.active.cpu(), active)
        for places, starts in (own.listed, list_active(on_device(active))):
            same = same and torch.equal(starts.cpu(), made.starts) and len(places) == active.numel()
            same = same and torch.equal(places[:count].cpu(), made.places[:count])
        found[name] = same
    nan = on_device(torch.full((1, 2), math.nan))
    found["no number"] = not any(decide(nan, -math.inf, inclusive=i, backend="kernel").active.any() for i in (0, 1))
    logit, threshold, valid = map(on_device, operands(SIZES["several"], "one a token", padded=True))
    for op, arguments in ((_decide, (logit, threshold, 0.0, valid, True)), (list_active, (logit > 0,))):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
