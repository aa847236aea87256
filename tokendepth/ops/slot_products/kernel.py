"""Products of up to `SLOTS` rows, each fused with what comes before and after it: two launches fewer than the library.

Weight matrices are split over programs by rows, and long rows are split, too (split-K); the last part of a sum to
finish combines the parts. The warps of a program each take a piece of the sum, because a tile of so few rows is work
for only one warp. Before a program waits for the previous kernel, it prefetches its weights into the L2 cache.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.few_rows.kernel import counters, flags_of, programs_at_once
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped
from tokendepth.ops.rows.kernel import ACTIVATIONS, _gelu, _gelu_tanh, _silu
from tokendepth.ops.sparse_block import BlockWeights

SLOTS = 16
TILE = {"BLOCK_N": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 5}
"""BLOCK_K: elements that a warp takes at once."""
HIDDEN = {"BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
"""Wider, because each program computes the norm of all rows."""
LONGEST = 2048
"""Sums over more elements than this are split into parts."""


@triton.jit
def _fetch_tile(w, first, begin, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, LENGTH: tl.constexpr):
    """Prefetches `BLOCK_N` rows of w, `LENGTH` elements each, into the L2 cache, in pieces of 64 bytes."""
    row, piece = first + tl.arange(0, BLOCK_N), begin + 32 * tl.arange(0, LENGTH // 32)
    at = tl.minimum(row, N - 1).to(tl.int64)[:, None] * K + tl.minimum(piece, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(w + at).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _x_tile(x, there, k, K: tl.constexpr):
    """`[warp, slot, element]`; k: `[warp, element]`."""
    slot = tl.arange(0, 16)
    inside = there[None, :, None] & (k < K)[:, None, :]
    return tl.load(x + slot[None, :, None] * K + k[:, None, :], inside, 0.0)


@triton.jit
def _w_tile(w, first, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """`[warp, row, element]`"""
    row = first + tl.arange(0, BLOCK_N)
    inside = (row < N)[None, :, None] & (k < K)[:, None, :]
    return tl.load(w + row.to(tl.int64)[None, :, None] * K + k[:, None, :], inside, 0.0)


@triton.jit
def _numbers(start, WARPS: tl.constexpr, BLOCK_K: tl.constexpr):
    return start + tl.arange(0, WARPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _times(x_tile, w_tile, sums):
    return tl.dot(x_tile, tl.permute(w_tile, (0, 2, 1)), sums, input_precision="ieee")


@triton.jit
def _project(
    x, w, out, batch,
    K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    LENGTH: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = x w^T"""
    first = tl.program_id(0) * BLOCK_N
    if FETCH:
        _fetch_tile(w, first, 0, N, K, BLOCK_N, LENGTH)
    after_previous(OVERLAP)
    slot, column = tl.arange(0, 16), first + tl.arange(0, BLOCK_N)
    there = slot < batch
    sums = tl.zeros([WARPS, 16, BLOCK_N], tl.float32)
    for start in range(0, K, WARPS * BLOCK_K):
        k = _numbers(start, WARPS, BLOCK_K)
        sums = _times(_x_tile(x, there, k, K), _w_tile(w, first, k, N, K, BLOCK_N), sums)
    let_next_begin(OVERLAP)
    inside = there[:, None] & (column < N)[None, :]
    tl.store(out + slot[:, None] * N + column[None, :], tl.sum(sums, 0).to(out.dtype.element_ty), inside)


@triton.jit
def _update(
    x, w, bias, gate, active, h, partial, arrived, batch,
    ALL: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, LENGTH: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """h += gate * (x w^T + bias) for active rows; program (columns, part): a sum over `LENGTH` elements."""
    tile, part = tl.program_id(0), tl.program_id(1)
    first, begin = tile * BLOCK_N, part * LENGTH
    if FETCH:
        _fetch_tile(w, first, begin, D, K, BLOCK_N, LENGTH)
    after_previous(OVERLAP)
    slot, column = tl.arange(0, 16), first + tl.arange(0, BLOCK_N)
    there = slot < batch
    if not ALL:
        there = there & (tl.load(active + slot, there, 0) != 0)
    sums = tl.zeros([WARPS, 16, BLOCK_N], tl.float32)
    for start in range(begin, begin + LENGTH, WARPS * BLOCK_K):
        k = _numbers(start, WARPS, BLOCK_K)
        sums = _times(_x_tile(x, there, k, K), _w_tile(w, first, k, D, K, BLOCK_N), sums)
    let_next_begin(OVERLAP)
    found, last = tl.sum(sums, 0), True
    if PARTS > 1:
        mine = partial + ((tile * PARTS + part) * 16 + slot)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(mine, found)
        tl.debug_barrier()  # all threads store before the counter is incremented
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(arrived + tile, 0)  # reset for the next kernel
            found = tl.zeros([16, BLOCK_N], tl.float32)
            for piece in tl.static_range(PARTS):  # in a fixed order, for reproducible results
                of = partial + ((tile * PARTS + piece) * 16 + slot)[:, None] * BLOCK_N
                found += tl.load(of + tl.arange(0, BLOCK_N)[None, :], cache_modifier=".cg")
        inside = there[:, None] & (column < D)[None, :]
        if BIAS:
            found += tl.load(bias + column, column < D, 0.0).to(tl.float32)[None, :]
        if GATE:
            found *= tl.load(gate + slot, there, 0.0).to(tl.float32)[:, None]
        at = h + slot[:, None] * D + column[None, :]
        found += tl.load(at, inside, 0.0).to(tl.float32)
        tl.store(at, found.to(h.dtype.element_ty), inside)


@triton.jit
def _make_hidden(
    h, norm, norm_bias, eps, w, bias, active, hidden, batch,
    ALL: tl.constexpr, BIAS: tl.constexpr, RMS: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr,
    FF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    LENGTH: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The hidden units of active rows, from their norm, which every program computes itself."""
    GATED: tl.constexpr = ACTIVATION >= 2
    first = tl.program_id(0) * BLOCK_N
    if FETCH:
        _fetch_tile(w, first, 0, FF, D, BLOCK_N, LENGTH)
        if GATED:
            _fetch_tile(w + FF * D, first, 0, FF, D, BLOCK_N, LENGTH)
    after_previous(OVERLAP)
    slot, unit = tl.arange(0, 16), first + tl.arange(0, BLOCK_N)
    there = slot < batch
    if not ALL:
        there = there & (tl.load(active + slot, there, 0) != 0)
    mean, square = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)
    if not RMS:
        for start in range(0, D, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            inside = there[:, None] & (column < D)[None, :]
            mean += tl.sum(tl.load(h + slot[:, None] * D + column[None, :], inside, 0.0).to(tl.float32), 1) / D
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = there[:, None] & (column < D)[None, :]
        value = tl.load(h + slot[:, None] * D + column[None, :], inside, 0.0).to(tl.float32)
        value = tl.where(inside, value - mean[:, None], 0.0)
        square += tl.sum(value * value, 1) / D
    root = tl.rsqrt(square + eps)
    made = tl.zeros([WARPS, 16, BLOCK_N], tl.float32)
    factor = tl.zeros([WARPS, 16, BLOCK_N], tl.float32)
    for start in range(0, D, WARPS * BLOCK_K):
        k = _numbers(start, WARPS, BLOCK_K)
        w_tile = _w_tile(w, first, k, FF, D, BLOCK_N)
        value = (_x_tile(h, there, k, D).to(tl.float32) - mean[None, :, None]) * root[None, :, None]
        value *= tl.load(norm + k, k < D, 0.0).to(tl.float32)[:, None, :]
        if not RMS:
            value += tl.load(norm_bias + k, k < D, 0.0).to(tl.float32)[:, None, :]
        x_tile = value.to(w_tile.dtype)
        made = _times(x_tile, w_tile, made)
        if GATED:
            factor = _times(x_tile, _w_tile(w + FF * D, first, k, FF, D, BLOCK_N), factor)
    let_next_begin(OVERLAP)
    known = unit < FF
    value = tl.sum(made, 0)
    if BIAS:
        value += tl.load(bias + unit, known, 0.0).to(tl.float32)[None, :]
    if GATED:
        other = tl.sum(factor, 0)
        if BIAS:
            other += tl.load(bias + FF + unit, known, 0.0).to(tl.float32)[None, :]
        value = (_silu(value) if ACTIVATION == 2 else _gelu_tanh(value)) * other
    else:
        value = _gelu(value)
    to = hidden + slot[:, None] * FF + unit[None, :]
    tl.store(to, value.to(hidden.dtype.element_ty), there[:, None] & known[None, :])


def _sizes(length: int, tile: dict[str, int]) -> dict[str, int]:
    """Launch arguments for a sum over `length` elements."""
    warps = tile["num_warps"]
    block = max(16, min(tile["BLOCK_K"], triton.next_power_of_2(length) // warps))
    return {**tile, "BLOCK_K": block, "WARPS": warps, "LENGTH": triton.next_power_of_2(max(length, warps * block))}


def project(x: Tensor, w: Tensor) -> Tensor:
    """x w^T for x `[slot, k]`"""
    (batch, k), out, sizes = x.shape, x.new_empty(len(x), len(w)), _sizes(x.shape[1], TILE)
    grid = (triton.cdiv(len(w), sizes["BLOCK_N"]),)
    _project[grid](x, w, out, batch, K=k, N=len(w), FETCH=x.is_cuda, **sizes, **overlapped(x))
    return out


def update(h: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, active: Tensor | None, gate: Tensor | None) -> None:
    """Adds gate * (x w^T + bias) to the active rows of h `[slot, d]`."""
    (batch, d), k = h.shape, x.shape[1]
    parts = triton.cdiv(k, LONGEST)
    sizes = _sizes(triton.cdiv(k, parts), TILE)
    parts = triton.cdiv(k, sizes["LENGTH"])
    tiles = triton.cdiv(d, sizes["BLOCK_N"])
    partial = h.new_empty(tiles * parts * SLOTS * sizes["BLOCK_N"] if parts > 1 else 0, dtype=torch.float32)
    _, arrived = counters(h.device, programs_at_once(h.device))
    _update[(tiles, parts)](
        x, w, h if bias is None else bias, h if gate is None else gate, flags_of(active, h), h, partial, arrived, batch,
        ALL=active is None, GATE=gate is not None, BIAS=bias is not None, K=k, D=d, PARTS=parts, FETCH=h.is_cuda,
        **sizes, **overlapped(h),
    )  # fmt: skip


def make_hidden(h: Tensor, active: Tensor | None, w: BlockWeights) -> Tensor:
    """`[slot, d_ff]`; inactive rows are not written."""
    (batch, d), ff, sizes = h.shape, w.down.shape[1], _sizes(h.shape[1], HIDDEN)
    hidden, block_d = h.new_empty(batch, ff), min(256, triton.next_power_of_2(d))
    _make_hidden[(triton.cdiv(ff, sizes["BLOCK_N"]),)](
        h, w.norm, w.norm if w.norm_bias is None else w.norm_bias, w.eps, w.up, h if w.up_bias is None else w.up_bias,
        flags_of(active, h), hidden, batch, ALL=active is None, BIAS=w.up_bias is not None, RMS=w.norm_bias is None,
        ACTIVATION=ACTIVATIONS.index(w.activation), D=d, FF=ff, BLOCK_D=block_d, FETCH=h.is_cuda, **sizes,
        **overlapped(h),
    )  # fmt: skip
    return hidden
