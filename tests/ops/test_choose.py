"""Who is active, and the list of them: eager and kernel against the reference, token by token.

The kernel is asked in one subprocess, this file run as a script: Triton's interpreter has to be chosen before Triton is
imported. On a GPU the same script asks the real kernel.
"""

import json
import math

import pytest
import torch
from torch import Tensor

from tokendepth.ops.choose import choose

SIZES = {"one token": (1, 1), "a sequence": (1, 37), "several": (5, 19), "blocks": (3, 1030), "none": (0, 4)}
ON_A_GPU = {"the paper's": (64, 256), "GPT-2's": (16, 1024)}
MEASURED = {**SIZES, **(ON_A_GPU if torch.cuda.is_available() else {})}
THRESHOLDS = ["a number", "a tensor", "one a token", "nobody", "everybody"]


def operands(size: tuple[int, int], kind: str, *, padded: bool) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Logits of which some are at the threshold to the bit."""
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
def test_eager_and_kernel_choose_as_the_reference_does(measured, name, kind, inclusive, padded):
    given = operands(SIZES[name], kind, padded=padded)
    expected, listed = choose(*given, inclusive=inclusive, backend="reference")
    assert listed is not None
    assert torch.equal(choose(*given, inclusive=inclusive).active, expected)
    assert listed.places[: listed.starts[-1]].tolist() == expected.flatten().nonzero().flatten().tolist()
    assert measured[f"{name}, {kind}, {inclusive}, {padded}"], "the kernel's list, and one made of the flags"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter would take a minute")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_kernel_chooses_as_the_reference_does_at_full_size(measured, name):
    cases = [same for case, same in measured.items() if case.startswith(name)]
    assert cases
    assert all(cases)


def test_a_logit_that_is_no_number_is_not_active():
    nan = torch.full((1, 2), math.nan)
    assert not choose(nan, -math.inf).active.any()
    assert not choose(nan, -math.inf, inclusive=True).active.any()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        choose(torch.zeros(1, 1), 0.0, backend="fast")


def _measure() -> None:
    """Print one JSON object: for every case, whether the kernel chose and listed as the reference does."""
    from tokendepth.ops.choose.kernel import list_active

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds what is no place
    found = {}
    for name, size in MEASURED.items():
        for kind in THRESHOLDS:
            for inclusive in (False, True):
                for padded in (False, True):
                    given = operands(size, kind, padded=padded)
                    active, listed = choose(*given, inclusive=inclusive, backend="reference")
                    there = [x.to(device) if isinstance(x, Tensor) else x for x in given]
                    own, own_list = choose(*there, inclusive=inclusive, backend="kernel")
                    assert listed is not None
                    assert own_list is not None
                    count = int(listed.starts[-1])
                    same = torch.equal(own.cpu(), active)
                    for index, starts in (own_list, list_active(active.to(device))):
                        same = same and torch.equal(starts.cpu(), listed.starts)
                        same = same and torch.equal(index[:count].cpu(), listed.places[:count])
                    found[f"{name}, {kind}, {inclusive}, {padded}"] = same
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
