"""Numbers that the host hears of while the rest of a pass runs."""

import pytest
import torch

from tokendepth.ops.announced import announced, heard_by


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * announced(x + 1)


@pytest.mark.parametrize("compiles", [False, True])
@torch.no_grad()
def test_whoever_listens_hears_it_and_nobody_else(compiles):
    torch.compiler.reset()
    run = torch.compile(doubled, backend="eager", fullgraph=True) if compiles else doubled
    heard = []
    assert run(torch.ones(2)).tolist() == [4, 4], "nobody listens"
    with heard_by(lambda numbers: heard.append(numbers.tolist())):
        assert run(torch.ones(2)).tolist() == [4, 4]
        with heard_by(lambda numbers: heard.append("inner")):
            run(torch.zeros(2))
        run(torch.zeros(2))
    run(torch.zeros(2))
    assert heard == [[2, 2], "inner", [1, 1]]


def test_what_is_announced_is_a_copy():
    x = torch.ones(2)
    announced(x).zero_()
    assert x.tolist() == [1, 1]


def test_a_listener_that_fails_is_forgotten():
    def fail(numbers: torch.Tensor) -> None:
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"), heard_by(fail):
        announced(torch.ones(1))
    assert announced(torch.ones(1)).tolist() == [1]
