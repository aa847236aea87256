"""One kernel. Every program normalises its own rows, which is cheaper than reading them back from memory."""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.decide import Decision
from tokendepth.ops.decide.kernel import BY_NUMBER, above, by_what, tensor_or_number
from tokendepth.ops.launch import FEW_TOKENS, check_kernel, fits_one_tile
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

# Programs share the bandwidth of the L2 cache, from which each reads its rows and its columns of w. With many rows each
# program takes all columns, which reads the least; with few rows every multiprocessor must get a program.
MANY = {"BLOCK_M": 64, "BLOCK_N": 64, "COLUMNS": 512, "num_warps": 4, "num_stages": 2}
FEW = {"BLOCK_M": 64, "BLOCK_N": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 1}
FEWEST = {"BLOCK_M": 16, "BLOCK_N": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 1}
FEWEST_TOKENS = 512


@triton.jit
def _enter(
    h, norm, norm_bias, w, w1, b1, w2, b2, threshold, number, valid, x, y, logit, keep, active, rows, eps,
    D: tl.constexpr, OUT: tl.constexpr, ROUTER: tl.constexpr, NORMED: tl.constexpr, HIDDEN: tl.constexpr,
    BY: tl.constexpr, INCLUSIVE: tl.constexpr, VALID: tl.constexpr,
    BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the i-th block of rows, normalised, times the j-th block of columns of w.

    The first column block also writes the normalised rows; the last also runs the router and decides.
    """
    after_previous(OVERLAP)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    feature = tl.arange(0, D)
    there = row < rows
    at = row[:, None] * D + feature[None, :]
    tile = tl.load(h + at, mask=there[:, None], other=0.0)
    value = tile.to(tl.float32)
    value -= (tl.sum(value, 1) / D)[:, None]
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    if ROUTER:  # noqa: SIM102 - constexpr: compiled only if true
        if tl.program_id(1) == tl.num_programs(1) - 1:
            unit = tl.arange(0, BLOCK_H)
            w1_tile = tl.load(w1 + unit[:, None] * D + feature[None, :], mask=(unit < HIDDEN)[:, None], other=0.0)
            source = value.to(tile.dtype) if NORMED else tile
            hidden = tl.dot(source, tl.trans(w1_tile), input_precision="ieee")
            hidden += tl.load(b1 + unit, mask=unit < HIDDEN, other=0.0).to(tl.float32)[None, :]
            hidden = tl.where(hidden < 0, 0.0, hidden)  # tl.maximum would hide a NaN
            weight = tl.load(w2 + unit, mask=unit < HIDDEN, other=0.0).to(tl.float32)
            said = tl.sum(hidden * weight[None, :], 1) + tl.load(b2).to(tl.float32)
            tl.store(logit + row, said, mask=there)
            tl.store(keep + row, 1.0 / (1.0 + tl.exp(said)), mask=there)
            chosen = above(said, threshold, number, row, there, BY, INCLUSIVE)
            if VALID:
                chosen = chosen & (tl.load(valid + row, mask=there, other=0) != 0)
            tl.store(active + row, chosen.to(tl.uint8), mask=there)
    value *= tl.load(norm + feature).to(tl.float32)[None, :]
    value += tl.load(norm_bias + feature).to(tl.float32)[None, :]
    x_tile = value.to(x.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(x + at, x_tile, mask=there[:, None])
    for start in range(0, COLUMNS, BLOCK_N):
        column = tl.program_id(1) * COLUMNS + start + tl.arange(0, BLOCK_N)
        wanted = column < OUT
        w_tile = tl.load(w + column[:, None] * D + feature[None, :], mask=wanted[:, None], other=0.0)
        product = tl.dot(x_tile, tl.trans(w_tile), input_precision="ieee")
        inside = there[:, None] & wanted[None, :]
        tl.store(y + row[:, None] * OUT + column[None, :], product.to(y.dtype.element_ty), mask=inside)
    let_next_begin(OVERLAP)


@torch.library.custom_op("tokendepth::block_inputs", mutates_args=())
def _inputs(
    h: Tensor, norm: Tensor, norm_bias: Tensor, eps: float, w_kv: Tensor, router: list[Tensor], normed: bool,
    threshold: Tensor | None, number: float, valid: Tensor | None, inclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, d = w_kv.shape
    h, w_kv, router = h.contiguous(), w_kv.contiguous(), [w.contiguous() for w in router]
    x, y, logit, keep, active = made = _empty(h, out, bool(router))
    rows = h.numel() // d
    if rows:
        threshold, by = by_what(threshold, logit) if router else (None, BY_NUMBER)
        launch = MANY if rows > FEW_TOKENS else FEW if rows > FEWEST_TOKENS else FEWEST
        grid = (triton.cdiv(rows, launch["BLOCK_M"]), triton.cdiv(out, launch["COLUMNS"]))
        hidden = len(router[0]) if router else 0
        with torch.cuda.device_of(h):
            _enter[grid](
                h, norm, norm_bias, w_kv, *(router or [h] * 4), h if threshold is None else threshold, number,
                h if valid is None else valid.contiguous().view(torch.uint8), x, y, logit, keep,
                active.view(torch.uint8), rows, eps, D=d, OUT=out, ROUTER=bool(router), NORMED=normed, HIDDEN=hidden,
                BY=by, INCLUSIVE=inclusive, VALID=valid is not None, BLOCK_H=max(16, triton.next_power_of_2(hidden)),
                **overlapped(h), **launch,
            )  # fmt: skip
    return made


def _empty(h: Tensor, out: int, asked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens = h.shape[:-1] if asked else (0,)
    logit, keep = (h.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    active = h.new_empty(tokens, dtype=torch.bool)
    x = torch.empty_like(h, memory_format=torch.contiguous_format)
    return x, h.new_empty(*h.shape[:-1], out), logit, keep, active


@_inputs.register_fake
def _(h, norm, norm_bias, eps, w_kv, router, *_):
    return _empty(h, len(w_kv), bool(router))


def kernel(
    h: Tensor, norm, w_kv: Tensor, b_kv: Tensor | None, router, threshold
) -> tuple[Tensor, Tensor, Decision | None]:
    """As `reference`, plus the decision; for a LayerNorm and d a power of two from 16 to 256; no gradient."""
    check_kernel(h)
    if norm.shift is None or b_kv is not None or not fits_one_tile(h.shape[-1]):
        raise ValueError(
            "backend 'kernel' is for a LayerNorm, keys and values without bias, and d a power of two from 16 to 256; "
            "use 'eager'"
        )
    if router is None:
        x, kv, *_ = _inputs(h, *norm[:2], norm.eps, w_kv, [], False, None, 0.0, None, False)
        return x, kv, None
    limit = tensor_or_number(threshold.value)
    x, kv, logit, keep, active = _inputs(
        h, *norm[:2], norm.eps, w_kv, list(router[:4]), router.normed, *limit, threshold.valid, threshold.inclusive
    )
    return x, kv, Decision(active, logit, keep)
