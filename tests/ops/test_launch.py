"""Which inputs the kernels accept, and which they reject."""

import pytest
import torch

from tokendepth.ops.launch import (
    FEW_TOKENS,
    check_kernel,
    compiles_inference,
    fits_one_tile,
    has_triton,
    serves,
    unknown_backend,
)


def test_a_row_fits_one_tile_if_it_is_a_power_of_two_from_16_to_256():
    assert [d for d in range(1025) if fits_one_tile(d)] == [16, 32, 64, 128, 256]


def test_kernels_serve_low_precision_on_a_gpu_where_no_gradient_is_wanted(kernels_on_a_gpu):
    found = []
    states = [torch.zeros(2, 5, 16, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    with torch.no_grad():
        assert not any(serves(h) for h in states), "not on a CPU"
        kernels_on_a_gpu(lambda *given: found.extend(serves(h) for h in given), *states)
    assert found == [True, True, False]
    kernels_on_a_gpu(lambda *given: found.extend(serves(h) for h in given), *states)
    assert found[3:] == [False, False, False]


def test_a_kernel_refuses_narrow_heads_and_full_precision_on_a_gpu(kernels_on_a_gpu):
    h = torch.zeros(2, 5, 16)
    check_kernel(h, width=16)
    kernels_on_a_gpu(check_kernel, h.bfloat16())
    with pytest.raises(ValueError, match="width 16 or more, not 8; use 'eager'"):
        check_kernel(h, width=8)
    with pytest.raises(ValueError, match=r"bfloat16 and float16 on a GPU, not torch.float32; use 'eager'"):
        kernels_on_a_gpu(check_kernel, h)


def test_an_unknown_backend_is_told_the_known_ones():
    assert str(unknown_backend("fast")) == "unknown backend 'fast': not one of auto, reference, eager, kernel"


def test_a_compiler_takes_the_answers_for_constants():
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + int(has_triton()) + 2 * int(compiles_inference())

    compiled = torch.compile(asked, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(torch.zeros(1)).item() == has_triton() + 2
        assert asked(torch.zeros(1)).item() == has_triton()
    assert compiled(torch.zeros(1)).item() == has_triton()


def test_without_a_gpu_kernels_do_not_overlap():
    pytest.importorskip("triton")
    from tokendepth.ops.launch.kernel import overlapped

    assert overlapped(torch.zeros(1, FEW_TOKENS, 16)) == {"OVERLAP": 0}
