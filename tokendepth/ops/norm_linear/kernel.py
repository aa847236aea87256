"""One kernel: every program normalises its rows for itself, which costs less than reading them back would."""

# A launch takes numbers for constexpr and options that are no parameters: more than a type checker can know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.overlap import after_previous, overlapped

MANY = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8}
FEW = {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4}
MANY_ROWS = 4096
"""With fewer, tiles are small, so that there are enough of them for all multiprocessors."""


@triton.jit
def _norm_linear(
    h, norm, norm_bias, w, x, y, rows,
    D: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.arange(0, D)
    there, wanted = row < rows, column < OUT
    at = row[:, None] * D + feature[None, :]
    w_tile = tl.load(w + column[:, None] * D + feature[None, :], mask=wanted[:, None], other=0.0)
    value = tl.load(h + at, mask=there[:, None], other=0.0).to(tl.float32)
    value -= (tl.sum(value, 1) / D)[:, None]
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + 1e-5)[:, None]
    value *= tl.load(norm + feature).to(tl.float32)[None, :]
    value += tl.load(norm_bias + feature).to(tl.float32)[None, :]
    x_tile = value.to(x.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(x + at, x_tile, mask=there[:, None])
    product = tl.dot(x_tile, tl.trans(w_tile), input_precision="ieee")
    inside = there[:, None] & wanted[None, :]
    tl.store(y + row[:, None] * OUT + column[None, :], product.to(y.dtype.element_ty), mask=inside)


@torch.library.custom_op("tokendepth::norm_linear", mutates_args=())
def _op(h: Tensor, norm: Tensor, norm_bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    out, d = w.shape
    h, w = h.contiguous(), w.contiguous()
    x, y = torch.empty_like(h), h.new_empty(*h.shape[:-1], out)
    rows = h.numel() // d
    if rows:
        launch = MANY if rows > MANY_ROWS else FEW
        grid = (triton.cdiv(rows, launch["BLOCK_M"]), triton.cdiv(out, launch["BLOCK_N"]))
        with torch.cuda.device_of(h):
            _norm_linear[grid](h, norm, norm_bias, w, x, y, rows, D=d, OUT=out, **overlapped(h), **launch)
    return x, y


@_op.register_fake
def _(h, norm, norm_bias, w):
    return torch.empty_like(h, memory_format=torch.contiguous_format), h.new_empty(*h.shape[:-1], len(w))


def kernel(h: Tensor, norm: Tensor, norm_bias: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference`, for d a power of two from 16 on; no gradient."""
    return _op(h, norm, norm_bias, w)
