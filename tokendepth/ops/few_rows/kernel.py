"""Products of a few rows with matrices. `row` is an active token's index among the active ones, `place` its slot.

A single token (BLOCK_M = 1) is multiplied without tensor cores, so that all of its weights can be in flight at once.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Each piece of a weight row costs one memory latency, so pieces are as long as registers and shared memory allow.
# BLOCK_D is the length if the input is normalised first; a row that fits in one piece is read once.
ALONE = {"BLOCK_M": 1, "BLOCK_D": 1024, "BLOCK_K": 1024, "num_warps": 8}
FEW = {"BLOCK_M": 16, "BLOCK_D": 1024, "BLOCK_K": 512, "num_warps": 8, "num_stages": 2}
FEWEST_COLUMNS, MOST_COLUMNS = 16, 32
"""Matrix rows that a program takes at once; for a single token as few as one."""


# --- rows of tokens ---------------------------------------------------------------------------------------------------


@triton.jit
def rows(active, first, batch, ALL: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr):
    """Places of the active rows from `first` on, whether each row exists, and the number of active rows."""
    row = first + tl.arange(0, BLOCK_M)
    if ALL:
        place, count = row, batch
    else:
        slot = tl.arange(0, BLOCK_B)
        flag = (tl.load(active + slot, mask=slot < batch, other=0) != 0).to(tl.int32)
        rank = tl.cumsum(flag, 0) - flag
        own = (rank[None, :] == row[:, None]) & (flag != 0)[None, :]
        place, count = tl.sum(tl.where(own, slot[None, :], 0), 1), tl.sum(flag, 0)
    there = row < count
    return tl.where(there, place, 0).to(tl.int64), there, count


@triton.jit
def place_of(active, row, batch, ALL: tl.constexpr, BLOCK_B: tl.constexpr):
    """The slot of one active row."""
    place = row
    if not ALL:
        slot = tl.arange(0, BLOCK_B)
        flag = (tl.load(active + slot, mask=slot < batch, other=0) != 0).to(tl.int32)
        own = (tl.cumsum(flag, 0) - flag == row) & (flag != 0)
        place = tl.sum(tl.where(own, slot, 0), 0)
    return place.to(tl.int64)


@triton.jit
def count(active, batch, ALL: tl.constexpr, BLOCK_B: tl.constexpr):
    if ALL:
        return batch
    slot = tl.arange(0, BLOCK_B)
    return tl.sum((tl.load(active + slot, mask=slot < batch, other=0) != 0).to(tl.int32), 0)


# --- products ---------------------------------------------------------------------------------------------------------


@triton.jit
def numbers(x, at, there, k, K: tl.constexpr):
    """`[row, k]` of `x` in float32. Bypasses the L1 cache, since another program may just have written it."""
    inside = there[:, None] & (k < K)[None, :]
    return tl.load(x + at[:, None] + k[None, :], inside, 0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def statistics(value, known, RMS: tl.constexpr, K: tl.constexpr):
    """Mean (0 for an RMSNorm) and variance around it, for rows that are held whole."""
    mean = tl.sum(value, 1) * (0.0 if RMS else 1.0 / K)
    left = tl.where(known, value - mean[:, None], 0.0)
    return mean, tl.sum(left * left, 1) / K


@triton.jit
def statistics_in_pieces(
    x, at, there, RMS: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    mean, square = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if not RMS:
        for start in range(0, K, BLOCK_K):
            mean += tl.sum(numbers(x, at, there, start + tl.arange(0, BLOCK_K), K), 1) / K
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.where((k < K)[None, :], numbers(x, at, there, k, K) - mean[:, None], 0.0)
        square += tl.sum(left * left, 1) / K
    return mean, square


@triton.jit
def normalised(value, k, mean, square, eps, scale, shift, SCALED: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr):
    value = (value - mean[:, None]) * tl.rsqrt(square + eps)[:, None]
    if SCALED:
        value *= tl.load(scale + k, k < K, 0.0).to(tl.float32)[None, :]
    if SHIFTED:
        value += tl.load(shift + k, k < K, 0.0).to(tl.float32)[None, :]
    return tl.where((k < K)[None, :], value, 0.0)


@triton.jit
def product(
    x, at, there, eps, scale, shift, w, column, wanted,
    NORM: tl.constexpr, SCALED: tl.constexpr, RMS: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`[row, column]` of x w^T in float32, for rows of x that begin at `at`; with NORM they are normalised first.

    Weights are loaded before the states that they are multiplied by.
    """
    w_at = w + column.to(tl.int64)[:, None] * K
    SHIFTED: tl.constexpr = SCALED and not RMS
    if NORM and K > BLOCK_K:
        mean, square = statistics_in_pieces(x, at, there, RMS, K, BLOCK_M, BLOCK_K)
    if BLOCK_M == 1:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):  # unrolled, so that all weights are in flight together
            k = start + tl.arange(0, BLOCK_K)
            w_tile = tl.load(w_at + k[None, :], wanted[:, None] & (k < K)[None, :], 0.0)
            value = numbers(x, at, there, k, K)
            if NORM:
                if K <= BLOCK_K:
                    mean, square = statistics(value, (k < K)[None, :], RMS, K)
                value = normalised(value, k, mean, square, eps, scale, shift, SCALED, SHIFTED, K)
            sums += w_tile.to(tl.float32) * value
        found = tl.sum(sums, 1)[None, :]
    elif NORM and K <= BLOCK_K:
        k = tl.arange(0, BLOCK_K)
        w_tile = tl.load(w_at + k[None, :], wanted[:, None] & (k < K)[None, :], 0.0)
        value = numbers(x, at, there, k, K)
        mean, square = statistics(value, (k < K)[None, :], RMS, K)
        x_tile = normalised(value, k, mean, square, eps, scale, shift, SCALED, SHIFTED, K).to(w_tile.dtype)
        found = tl.dot(x_tile, tl.trans(w_tile), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), input_precision="ieee")
    else:
        found = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w_tile = tl.load(w_at + k[None, :], wanted[:, None] & (k < K)[None, :], 0.0)
            if NORM:
                value = numbers(x, at, there, k, K)
                x_tile = normalised(value, k, mean, square, eps, scale, shift, SCALED, SHIFTED, K).to(w_tile.dtype)
            else:  # not converted, so that the next piece can be loaded meanwhile
                inside = there[:, None] & (k < K)[None, :]
                x_tile = tl.load(x + at[:, None] + k[None, :], inside, 0.0, cache_modifier=".cg")
            found = tl.dot(x_tile, tl.trans(w_tile), found, input_precision="ieee")
    return found


@triton.jit
def fetch(w, first, rows, ROWS: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """Prefetch rows `first` to `first + ROWS` of a matrix with `rows` rows into the L2 cache, without waiting.

    LINES: number of pieces of 32 bytes (elements of two bytes), rounded up.
    """
    offset = tl.minimum(tl.arange(0, LINES) * 16, ROWS * K - 1)
    offset = tl.minimum(first.to(tl.int64) * K + offset, rows * K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(w + offset).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# --- launches ---------------------------------------------------------------------------------------------------------


@cache
def programs_at_once(device: torch.device) -> int:
    """One per multiprocessor. Triton's interpreter runs programs one after another, so there it is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def counters(device: torch.device, programs: int) -> tuple[Tensor, Tensor]:
    """Counters for the barrier of all programs and for those of a row; kernels leave them ready for the next kernel.

    They are shared, so a device can run only one decoding step at a time. They must exist before a CUDA graph is
    captured, so the step is run once before the capture.
    """
    return torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2**16, dtype=torch.int32, device=device)


def launch(h: Tensor) -> dict[str, int]:
    """Block sizes for tokens `h` `[slots, 1, d]`."""
    chosen, most = ALONE if len(h) == 1 else FEW, max(16, triton.next_power_of_2(h.shape[-1]))
    return {**chosen, "BLOCK_D": min(chosen["BLOCK_D"], most), "BLOCK_K": min(chosen["BLOCK_K"], most)}


def columns_of(count: int, programs: int, rows: int, matrices: int = 1) -> int:
    """How many of `count` rows of each matrix a program takes at once."""
    fewest, share = 1 if rows == 1 else FEWEST_COLUMNS, triton.next_power_of_2(triton.cdiv(count, programs))
    return max(fewest, min(MOST_COLUMNS // matrices, share))


def lines_of(k: int) -> int:
    """Pieces of 32 bytes in a row of `k` elements."""
    return triton.next_power_of_2(triton.cdiv(k, 16))


def flags_of(flags: Tensor | None, other: Tensor) -> Tensor:
    return other if flags is None else flags.contiguous().view(torch.uint8)
