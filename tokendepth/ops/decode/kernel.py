"""Two kernels a block. The grid is fixed; what is halted is known on the device alone.

`_enter`: every program makes some rows of keys and values; the last of those that run the router decides.
`_work`: one program a multiprocessor, all resident at once, which meet between the steps of the block. Returns at once
where nobody is active: five empty kernels would take as long as a third of a block's weights.

`row` is an active token's index among the active ones, `place` its slot. One token alone (BLOCK_M = 1) is multiplied
without tensor cores: each warp streams whole rows of a matrix.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.decide import Decision
from tokendepth.ops.decide.kernel import BY_NUMBER, above, by_what, tensor_or_number
from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped
from tokendepth.ops.rows.kernel import ACTIVATIONS, _gelu, _gelu_tanh, _silu
from tokendepth.ops.sparse_block import BlockWeights

ALONE = {"BLOCK_M": 1, "BLOCK_K": 1024, "num_warps": 8}
FEW = {"BLOCK_M": 16, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4}
SOME = {"BLOCK_M": 32, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4}
FEWEST_COLUMNS, MOST_COLUMNS = 16, 32
"""Rows of a matrix that a program takes at once; of one token alone as few as there are for each program."""
PAIRS = 8
"""Pairs of a key's numbers that a program takes of one token alone."""
KEYS, MOST_KEYS = 64, 512
"""Keys that are attended over at once, and that a program takes of a row at the most."""


# --- parts ------------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(active, first, batch, ALL: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr):
    """Places of the active rows from `first` on, whether there is such a row, and the number of all."""
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
def _place(active, row, batch, ALL: tl.constexpr, BLOCK_B: tl.constexpr):
    """The slot of one active row."""
    place = row
    if not ALL:
        slot = tl.arange(0, BLOCK_B)
        flag = (tl.load(active + slot, mask=slot < batch, other=0) != 0).to(tl.int32)
        own = (tl.cumsum(flag, 0) - flag == row) & (flag != 0)
        place = tl.sum(tl.where(own, slot, 0), 0)
    return place.to(tl.int64)


@triton.jit
def _count(active, batch, ALL: tl.constexpr, BLOCK_B: tl.constexpr):
    if ALL:
        return batch
    slot = tl.arange(0, BLOCK_B)
    return tl.sum((tl.load(active + slot, mask=slot < batch, other=0) != 0).to(tl.int32), 0)


@triton.jit
def _statistics(x, at, there, eps, RMS: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mean (of an RMSNorm: 0) and reciprocal deviation of the rows of `x` that begin at `at`."""
    total = tl.zeros([BLOCK_M], tl.float32)
    if not RMS:
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = there[:, None] & (k < K)[None, :]
            total += tl.sum(tl.load(x + at[:, None] + k[None, :], inside, 0.0, cache_modifier=".cg").to(tl.float32), 1)
    mean = total / K
    square = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = there[:, None] & (k < K)[None, :]
        value = tl.load(x + at[:, None] + k[None, :], inside, 0.0, cache_modifier=".cg").to(tl.float32)
        value = tl.where(inside, value - mean[:, None], 0.0)
        square += tl.sum(value * value, 1)
    return mean, tl.rsqrt(square / K + eps)


@triton.jit
def _operand(
    x, at, there, k, mean, deviation, scale, shift,
    NORM: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """`[row, k]` of `x`, normalised where NORM."""
    known = (k < K)[None, :]
    value = tl.load(x + at[:, None] + k[None, :], there[:, None] & known, 0.0, cache_modifier=".cg").to(tl.float32)
    if NORM:
        value = (value - mean[:, None]) * deviation[:, None]
        if SCALED:
            value *= tl.load(scale + k, k < K, 0.0).to(tl.float32)[None, :]
        if SHIFTED:
            value += tl.load(shift + k, k < K, 0.0).to(tl.float32)[None, :]
        value = tl.where(known, value, 0.0)
    return value


@triton.jit
def _product(
    x, at, there, mean, deviation, scale, shift, w, column, wanted,
    NORM: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`[row, column]` of x w^T, in float32."""
    w_at = w + column.to(tl.int64)[:, None] * K
    if BLOCK_M == 1:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):  # unrolled, so that all loads are under way together
            k = start + tl.arange(0, BLOCK_K)
            w_tile = tl.load(w_at + k[None, :], wanted[:, None] & (k < K)[None, :], 0.0)
            x_tile = _operand(x, at, there, k, mean, deviation, scale, shift, NORM, SCALED, SHIFTED, K)
            sums += w_tile.to(tl.float32) * x_tile
        return tl.sum(sums, 1)[None, :]
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w_tile = tl.load(w_at + k[None, :], wanted[:, None] & (k < K)[None, :], 0.0)
            x_tile = _operand(x, at, there, k, mean, deviation, scale, shift, NORM, SCALED, SHIFTED, K)
            acc = tl.dot(x_tile.to(w_tile.dtype), tl.trans(w_tile), acc, input_precision="ieee")
        return acc


@triton.jit
def _fetch(w, first, rows, ROWS: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """Bring rows `first` to `first + ROWS` of a matrix of `rows` rows into the L2 cache, and do not wait for them.

    LINES: as many pieces of 32 bytes, of numbers of two bytes, as there are at least.
    """
    offset = tl.minimum(tl.arange(0, LINES) * 16, ROWS * K - 1)
    offset = tl.minimum(first.to(tl.int64) * K + offset, rows * K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(w + offset).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# --- keys, values and decision ----------------------------------------------------------------------------------------


@triton.jit
def _enter(
    h, norm, norm_bias, eps, w, b, head_norm, head_eps, keys, values, seen, writes, leaving, given, cos, sin, turns,
    w1, b1, w2, b2, threshold, number, valid, hidden, arrived, x, logit, keep, active, batch,
    slot_stride, head_stride, column_stride, seen_stride,
    RMS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr, ROTATE: tl.constexpr, LEAVING: tl.constexpr, ALL: tl.constexpr, UNITS: tl.constexpr,
    NORMED: tl.constexpr, BY: tl.constexpr, INCLUSIVE: tl.constexpr, VALID: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_U: tl.constexpr, LINES: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first programs each make BLOCK_U of the router's UNITS hidden units, the others pairs of a key or a value.

    A pair is what rotary positions turn: number i of a head and number i + HALF. turns: rows of cosines and sines from
    one slot to the next, 0 where all share them.
    """
    ROUTING: tl.constexpr = (UNITS + BLOCK_U - 1) // BLOCK_U
    PARTS: tl.constexpr = (HALF + BLOCK_P - 1) // BLOCK_P
    WIDTH: tl.constexpr = 2 * HALF
    tile = tl.program_id(0) - ROUTING
    if FETCH and ALL:  # needed whatever the previous kernel finds
        if tile < 0:
            _fetch(w1, tl.program_id(0) * BLOCK_U, UNITS, BLOCK_U, D, BLOCK_U * LINES)
        else:
            begin = tile // PARTS * WIDTH + tile % PARTS * BLOCK_P
            _fetch(w, begin, 2 * HEADS * WIDTH, BLOCK_P, D, BLOCK_P * LINES)
            _fetch(w, begin + HALF, 2 * HEADS * WIDTH, BLOCK_P, D, BLOCK_P * LINES)
    after_previous(OVERLAP)
    total = _count(given, batch, ALL, BLOCK_B)
    for first in range(0, total, BLOCK_M):
        place, there, count = _rows(given, first, batch, ALL, BLOCK_B, BLOCK_M)
        at = place * D
        mean, deviation = _statistics(h, at, there, eps, RMS, D, BLOCK_M, BLOCK_K)
        if tile < 0:
            unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
            found = _product(
                h, at, there, mean, deviation, h, h, w1, unit, unit < UNITS,
                NORMED, False, False, D, BLOCK_M, BLOCK_U, BLOCK_K,
            )  # fmt: skip
            found += tl.load(b1 + unit, unit < UNITS, 0.0).to(tl.float32)[None, :]
            inside = there[:, None] & (unit < UNITS)[None, :]
            tl.store(hidden + place[:, None] * UNITS + unit[None, :], found, inside)
        else:
            head, pair = tile // PARTS, tile % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
            known = pair < HALF
            column = head * WIDTH + pair
            one = _product(
                h, at, there, mean, deviation, norm, norm_bias, w, column, known,
                True, True, not RMS, D, BLOCK_M, BLOCK_P, BLOCK_K,
            )  # fmt: skip
            other = _product(
                h, at, there, mean, deviation, norm, norm_bias, w, column + HALF, known,
                True, True, not RMS, D, BLOCK_M, BLOCK_P, BLOCK_K,
            )  # fmt: skip
            if BIAS:
                one += tl.load(b + column, known, 0.0).to(tl.float32)[None, :]
                other += tl.load(b + column + HALF, known, 0.0).to(tl.float32)[None, :]
            into = values
            if head < HEADS:
                into = keys
                if HEAD_NORM:  # the program has the whole head
                    scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(other * other, 1)) / WIDTH + head_eps)[:, None]
                    one *= scale * tl.load(head_norm + pair, known, 0.0).to(tl.float32)[None, :]
                    other *= scale * tl.load(head_norm + HALF + pair, known, 0.0).to(tl.float32)[None, :]
                if ROTATE:
                    turn = (place * turns)[:, None] + pair[None, :]
                    c = tl.load(cos + turn, known[None, :], 0.0).to(tl.float32)
                    s = tl.load(sin + turn, known[None, :], 0.0).to(tl.float32)
                    one, other = one * c - other * s, other * c + one * s
            to = tl.load(writes + place, there, 0) * column_stride + place * slot_stride + head % HEADS * head_stride
            known = there[:, None] & known[None, :]
            tl.store(into + to[:, None] + pair[None, :], one.to(keys.dtype.element_ty), known)
            tl.store(into + to[:, None] + pair[None, :] + HALF, other.to(keys.dtype.element_ty), known)
            if tile == 0:
                for start in range(0, D, BLOCK_K):
                    k = start + tl.arange(0, BLOCK_K)
                    value = _operand(h, at, there, k, mean, deviation, norm, norm_bias, True, True, not RMS, D)
                    into_x = x + at[:, None] + k[None, :]
                    tl.store(into_x, value.to(x.dtype.element_ty), there[:, None] & (k < D)[None, :])
    let_next_begin(OVERLAP)
    if tile == 0:
        slot = tl.arange(0, BLOCK_B)
        inside = slot < batch
        others = tl.full([BLOCK_B], 1, tl.int32)
        if LEAVING:
            others = (tl.load(leaving + slot, inside, 0) != 0).to(tl.int32)
        flag_at = slot.to(tl.int64) * seen_stride + tl.load(writes + slot, inside, 0)
        tl.store(seen + flag_at, others.to(tl.uint8), inside)
    if UNITS > 0:  # noqa: SIM102 - compiled only where it holds
        if tile < 0:
            tl.debug_barrier()  # all threads have stored before one says so
            if tl.atomic_add(arrived, 1, sem="acq_rel") == ROUTING - 1:
                tl.store(arrived, 0)  # for the next kernel
                slot = tl.arange(0, BLOCK_B)
                inside = slot < batch
                said = tl.zeros([BLOCK_B], tl.float32) + tl.load(b2).to(tl.float32)
                for start in range(0, UNITS, 128):
                    unit = start + tl.arange(0, 128)
                    where = hidden + slot[:, None] * UNITS + unit[None, :]
                    value = tl.load(where, inside[:, None] & (unit < UNITS)[None, :], 0.0, cache_modifier=".cg")
                    value = tl.where(value < 0, 0.0, value)  # tl.maximum would hide a NaN
                    said += tl.sum(value * tl.load(w2 + unit, unit < UNITS, 0.0).to(tl.float32)[None, :], 1)
                tl.store(logit + slot, said, inside)
                tl.store(keep + slot, 1.0 / (1.0 + tl.exp(said)), inside)
                chosen = above(said, threshold, number, slot, inside, BY, INCLUSIVE)
                if VALID:
                    chosen = chosen & (tl.load(valid + slot, inside, 0) != 0)
                tl.store(active + slot, chosen.to(tl.uint8), inside)


# --- the block --------------------------------------------------------------------------------------------------------


@triton.jit
def _wait_for_all(met):
    """Every program passes here once all have come, and sees what all have written.

    `met` only grows, by the number of programs each time: nobody has to reset it.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64)
    before = tl.atomic_add(met, 1, sem="acq_rel")
    until = (before // programs + 1) * programs
    while tl.atomic_add(met, 0, sem="acquire") < until:
        pass
    tl.debug_barrier()


@triton.jit
def _query(
    q, at, head, norm, eps, cos, sin, turn,
    HALF: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One head's query as it was projected, normalised and turned."""
    unit = tl.arange(0, BLOCK_W)
    known = unit < 2 * HALF
    at += head * 2 * HALF
    own = tl.load(q + at + unit, known, 0.0, cache_modifier=".cg")
    if NORM:
        own *= tl.rsqrt(tl.sum(own * own, 0) / (2 * HALF) + eps) * tl.load(norm + unit, known, 0.0).to(tl.float32)
    if ROTATE:
        partner = tl.where(unit < HALF, unit + HALF, unit - HALF)
        other = tl.load(q + at + partner, known, 0.0, cache_modifier=".cg")
        if NORM:
            whole = tl.load(q + at + unit, known, 0.0, cache_modifier=".cg")
            scale = tl.rsqrt(tl.sum(whole * whole, 0) / (2 * HALF) + eps)
            other *= scale * tl.load(norm + partner, known, 0.0).to(tl.float32)
        angle = turn + tl.where(unit < HALF, unit, unit - HALF)
        c = tl.load(cos + angle, known, 0.0).to(tl.float32)
        s = tl.load(sin + angle, known, 0.0).to(tl.float32)
        own = own * c + tl.where(unit < HALF, -other, other) * s
    return own


@triton.jit
def _attend(
    q, keys, values, seen, own, begin, end, scale, column_stride,
    VALID: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of the keys from `begin` to `end`: the largest score, and sum and weighted values relative to it."""
    unit = tl.arange(0, BLOCK_W)
    known = (unit < WIDTH)[None, :]
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_W], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        at = key.to(tl.int64)[:, None] * column_stride + unit[None, :]
        inside = (key < end)[:, None] & known
        k_tile = tl.load(keys + at, inside, 0.0)
        v_tile = tl.load(values + at, inside, 0.0)
        fine = key < end
        if VALID:
            fine = fine & ((tl.load(seen + key, fine, 0) != 0) | (key == own))
        scores = tl.where(fine, tl.sum(k_tile.to(tl.float32) * q[None, :], 1) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing was seen yet
        p, fade = tl.exp2(scores - safe), tl.exp2(top - safe)
        total = total * fade + tl.sum(p, 0)
        acc = acc * fade + tl.sum(p[:, None] * v_tile.to(tl.float32), 0)
        top = new_top
    return tl.max(top, 0), tl.max(total, 0), acc


@triton.jit
def _work(
    h, x, keys, values, seen, columns, active, gate, cos, sin, turns,
    query, query_bias, query_norm, query_eps, w_out, out_bias, norm, norm_bias, eps, up, up_bias, down, down_bias,
    q, partial, attended, states, hidden, met, arrived, batch, scale,
    slot_stride, head_stride, column_stride, seen_stride,
    ALL: tl.constexpr, GATE: tl.constexpr, VALID: tl.constexpr, QUERY_BIAS: tl.constexpr, QUERY_NORM: tl.constexpr,
    ROTATE: tl.constexpr, OUT_BIAS: tl.constexpr, RMS: tl.constexpr, UP_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, SHARING: tl.constexpr, HALF: tl.constexpr,
    FF: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, Q_LINES: tl.constexpr, FF_LINES: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """SPLIT: keys of an attention row that one program takes; the last of a row's programs puts them together."""
    after_previous(OVERLAP)
    count = _count(active, batch, ALL, BLOCK_B)
    if count > 0:
        WIDTH: tl.constexpr = 2 * HALF
        Q: tl.constexpr = HEADS * WIDTH
        program, programs = tl.program_id(0), tl.num_programs(0)
        nothing = tl.zeros([BLOCK_M], tl.float32)
        GATED: tl.constexpr = ACTIVATION >= 2
        if FETCH:  # all weights of the block are under way while its steps wait for each other
            _fetch(query, program * BLOCK_Q, Q, BLOCK_Q, D, BLOCK_Q * LINES)
            _fetch(w_out, program * BLOCK_O, D, BLOCK_O, Q, BLOCK_O * Q_LINES)
            _fetch(up, program * BLOCK_U, FF, BLOCK_U, D, BLOCK_U * LINES)
            if GATED:
                _fetch(up + FF * D, program * BLOCK_U, FF, BLOCK_U, D, BLOCK_U * LINES)
            _fetch(down, program * BLOCK_O, D, BLOCK_O, FF, BLOCK_O * FF_LINES)
        let_next_begin(OVERLAP)
        for tile in range(program, tl.cdiv(Q, BLOCK_Q), programs):
            column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
            wanted = column < Q
            for first in range(0, count, BLOCK_M):
                place, there, _ = _rows(active, first, batch, ALL, BLOCK_B, BLOCK_M)
                found = _product(
                    x, place * D, there, nothing, nothing, x, x, query, column, wanted,
                    False, False, False, D, BLOCK_M, BLOCK_Q, BLOCK_K,
                )  # fmt: skip
                if QUERY_BIAS:
                    found += tl.load(query_bias + column, wanted, 0.0).to(tl.float32)[None, :]
                row = first + tl.arange(0, BLOCK_M)
                tl.store(q + row[:, None] * Q + column[None, :], found, there[:, None] & wanted[None, :])
        _wait_for_all(met)
        unit = tl.arange(0, BLOCK_W)
        for item in range(program, count * HEADS * SPLITS, programs):
            part, line = item % SPLITS, item // SPLITS
            head, row = line % HEADS, line // HEADS
            place = _place(active, row, batch, ALL, BLOCK_B)
            own = tl.load(columns + place)
            begin = part * SPLIT
            if begin <= own:
                of_head = place * slot_stride + head // SHARING * head_stride
                turned = _query(
                    q, row * Q, head, query_norm, query_eps, cos, sin, place * turns, HALF, QUERY_NORM, ROTATE, BLOCK_W
                )
                end = tl.minimum(begin + SPLIT, own + 1)
                top, total, acc = _attend(
                    turned, keys + of_head, values + of_head, seen + place * seen_stride, own, begin, end, scale,
                    column_stride, VALID, WIDTH, BLOCK_W, KEYS,
                )  # fmt: skip
                parts = own // SPLIT + 1
                to = attended + row * Q + head * WIDTH + unit
                if parts == 1:
                    tl.store(to, (acc / total).to(attended.dtype.element_ty), unit < WIDTH)
                else:
                    mine = partial + (line * SPLITS + part) * (WIDTH + 2)
                    tl.store(mine, top)
                    tl.store(mine + 1, total)
                    tl.store(mine + 2 + unit, acc, unit < WIDTH)
                    tl.debug_barrier()  # all threads have stored before one says so
                    if tl.atomic_add(arrived + line, 1, sem="acq_rel") == parts - 1:
                        tl.store(arrived + line, 0)  # for the next kernel
                        piece = tl.arange(0, BLOCK_S)
                        there = piece < parts
                        of = partial + (line * SPLITS + piece) * (WIDTH + 2)
                        tops = tl.load(of, there, float("-inf"), cache_modifier=".cg")
                        weight = tl.exp2(tops - tl.max(tops, 0))
                        totals = tl.load(of + 1, there, 0.0, cache_modifier=".cg")
                        inside = there[:, None] & (unit < WIDTH)[None, :]
                        accs = tl.load(of[:, None] + 2 + unit[None, :], inside, 0.0, cache_modifier=".cg")
                        whole = tl.sum(accs * weight[:, None], 0) / tl.sum(totals * weight, 0)
                        tl.store(to, whole.to(attended.dtype.element_ty), unit < WIDTH)
        _wait_for_all(met)
        for tile in range(program, tl.cdiv(D, BLOCK_O), programs):
            column = tile * BLOCK_O + tl.arange(0, BLOCK_O)
            wanted = column < D
            for first in range(0, count, BLOCK_M):
                place, there, _ = _rows(active, first, batch, ALL, BLOCK_B, BLOCK_M)
                row = first + tl.arange(0, BLOCK_M)
                found = _product(
                    attended, row * Q, there, nothing, nothing, x, x, w_out, column, wanted,
                    False, False, False, Q, BLOCK_M, BLOCK_O, BLOCK_K,
                )  # fmt: skip
                if OUT_BIAS:
                    found += tl.load(out_bias + column, wanted, 0.0).to(tl.float32)[None, :]
                if GATE:
                    found *= tl.load(gate + place, there, 0.0).to(tl.float32)[:, None]
                inside = there[:, None] & wanted[None, :]
                found += tl.load(h + place[:, None] * D + column[None, :], inside, 0.0).to(tl.float32)
                tl.store(states + row[:, None] * D + column[None, :], found, inside)
        _wait_for_all(met)
        for tile in range(program, tl.cdiv(FF, BLOCK_U), programs):
            column = tile * BLOCK_U + tl.arange(0, BLOCK_U)
            wanted = column < FF
            for first in range(0, count, BLOCK_M):
                row = first + tl.arange(0, BLOCK_M)
                there = row < count
                mean, deviation = _statistics(states, row * D, there, eps, RMS, D, BLOCK_M, BLOCK_K)
                found = _product(
                    states, row * D, there, mean, deviation, norm, norm_bias, up, column, wanted,
                    True, True, not RMS, D, BLOCK_M, BLOCK_U, BLOCK_K,
                )  # fmt: skip
                if UP_BIAS:
                    found += tl.load(up_bias + column, wanted, 0.0).to(tl.float32)[None, :]
                if GATED:
                    factor = _product(
                        states, row * D, there, mean, deviation, norm, norm_bias, up + FF * D, column, wanted,
                        True, True, not RMS, D, BLOCK_M, BLOCK_U, BLOCK_K,
                    )  # fmt: skip
                    if UP_BIAS:
                        factor += tl.load(up_bias + FF + column, wanted, 0.0).to(tl.float32)[None, :]
                    found = (_silu(found) if ACTIVATION == 2 else _gelu_tanh(found)) * factor
                else:
                    found = _gelu(found)
                to = hidden + row[:, None] * FF + column[None, :]
                tl.store(to, found.to(hidden.dtype.element_ty), there[:, None] & wanted[None, :])
        _wait_for_all(met)
        for tile in range(program, tl.cdiv(D, BLOCK_O), programs):
            column = tile * BLOCK_O + tl.arange(0, BLOCK_O)
            wanted = column < D
            for first in range(0, count, BLOCK_M):
                place, there, _ = _rows(active, first, batch, ALL, BLOCK_B, BLOCK_M)
                row = first + tl.arange(0, BLOCK_M)
                found = _product(
                    hidden, row * FF, there, nothing, nothing, x, x, down, column, wanted,
                    False, False, False, FF, BLOCK_M, BLOCK_O, BLOCK_K,
                )  # fmt: skip
                if DOWN_BIAS:
                    found += tl.load(down_bias + column, wanted, 0.0).to(tl.float32)[None, :]
                if GATE:
                    found *= tl.load(gate + place, there, 0.0).to(tl.float32)[:, None]
                inside = there[:, None] & wanted[None, :]
                found += tl.load(states + row[:, None] * D + column[None, :], inside, 0.0, cache_modifier=".cg")
                tl.store(h + place[:, None] * D + column[None, :], found.to(h.dtype.element_ty), inside)


# --- launches ---------------------------------------------------------------------------------------------------------


@cache
def _programs(device: torch.device) -> int:
    """As many as are resident at once; Triton's interpreter runs one after the other, so there they cannot meet."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _counters(device: torch.device, programs: int) -> tuple[Tensor, Tensor]:
    """Where programs meet, and where those of a row do. Kernels leave both ready for the next, which runs after them.

    Made before a graph is captured: whoever captures runs the same pass first.
    """
    return torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(2**16, dtype=torch.int32, device=device)


def _launch(h: Tensor) -> dict[str, int]:
    rows, d = len(h), h.shape[-1]
    chosen = ALONE if rows == 1 else FEW if rows <= FEW["BLOCK_M"] else SOME
    return {**chosen, "BLOCK_K": min(chosen["BLOCK_K"], max(16, triton.next_power_of_2(d)))}


def _columns(count: int, programs: int, rows: int) -> int:
    """How many of `count` rows of a matrix a program takes at once."""
    return min(MOST_COLUMNS, max(1 if rows == 1 else FEWEST_COLUMNS, triton.next_power_of_2(-(-count // programs))))


def _lines(k: int) -> int:
    """Pieces of 32 bytes of a row of `k` numbers."""
    return triton.next_power_of_2(triton.cdiv(k, 16))


def _flags(flags: Tensor | None, other: Tensor) -> Tensor:
    return other if flags is None else flags.contiguous().view(torch.uint8)


@torch.library.custom_op("tokendepth::decode_inputs", mutates_args=("keys", "values", "seen"))
def _inputs(
    h: Tensor, norm: Tensor, norm_bias: Tensor | None, eps: float, heads: int, w: Tensor, b: Tensor | None,
    head_norm: Tensor | None, head_eps: float, keys: Tensor, values: Tensor, seen: Tensor, writes: Tensor,
    cos: Tensor | None, sin: Tensor | None, leaving: Tensor | None, given: Tensor | None, router: list[Tensor],
    normed: bool, threshold: Tensor | None, number: float, valid: Tensor | None, inclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, _, d = h.shape
    h, w, router = h.contiguous(), w.contiguous(), [part.contiguous() for part in router]
    x, logit, keep, active = made = _empty(h, bool(router))
    if not batch:
        return made
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1, "a head's width must be contiguous"
    threshold, by = by_what(threshold, logit) if router else (None, BY_NUMBER)
    launch, half, units = _launch(h), keys.shape[3] // 2, len(router[0]) if router else 0
    most = PAIRS if batch == 1 else 16
    pairs = triton.next_power_of_2(half) if head_norm is not None else min(most, max(1, triton.next_power_of_2(half)))
    pairs = pairs if batch == 1 else max(16, pairs)
    hidden = h.new_empty(batch, max(1, units), dtype=torch.float32)
    grid = (triton.cdiv(units, 16) + 2 * heads * triton.cdiv(half, pairs),)
    _, arrived = _counters(h.device, _programs(h.device))
    flags = seen.view(torch.uint8)
    rotate = cos is not None and sin is not None
    with torch.cuda.device_of(h):
        _enter[grid](
            h, norm, norm if norm_bias is None else norm_bias, eps, w, w if b is None else b,
            w if head_norm is None else head_norm, head_eps, keys, values, flags, writes.contiguous(),
            _flags(leaving, flags), _flags(given, flags), *((cos.contiguous(), sin.contiguous()) if rotate else (h, h)),
            half if rotate and len(cos) > 1 else 0, *(router or [h] * 4), h if threshold is None else threshold, number,
            _flags(valid, flags), hidden, arrived, x, logit, keep, active.view(torch.uint8), batch,
            *keys.stride()[:3], seen.stride(0), RMS=norm_bias is None, D=d, HEADS=heads, HALF=half, BIAS=b is not None,
            HEAD_NORM=head_norm is not None, ROTATE=rotate, LEAVING=leaving is not None, ALL=given is None, UNITS=units,
            NORMED=normed, BY=by, INCLUSIVE=inclusive, VALID=valid is not None, BLOCK_B=triton.next_power_of_2(batch),
            BLOCK_P=pairs, BLOCK_U=16, LINES=_lines(d), FETCH=h.is_cuda, **overlapped(h), **launch,
        )  # fmt: skip
    return made


def _empty(h: Tensor, asked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = h.shape[:-1] if asked else (0,)
    logit, keep = (h.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    x = torch.empty_like(h, memory_format=torch.contiguous_format)
    return x, logit, keep, h.new_empty(tokens, dtype=torch.bool)


@_inputs.register_fake
def _(h, norm, norm_bias, eps, heads, w, b, head_norm, head_eps, keys, values, seen, writes, cos, sin, leaving, given,
      router, *_):  # fmt: skip
    return _empty(h, bool(router))


def inputs(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold) -> BlockInputs:
    """As `reference`; rows of x that are not `active` are not written."""
    check_kernel(h, layer.keys.shape[3])
    cos, sin = rotation or (None, None)
    limit = (None, 0.0) if threshold is None else tensor_or_number(threshold.value)
    valid, inclusive = (None, False) if threshold is None else threshold[1:]
    x, logit, keep, chosen = _inputs(
        h, *norm, *keys, *layer[:3], writes, cos, sin, leaving, active, list(router[:4]) if router else [],
        router is not None and router.normed, *limit, valid, inclusive,
    )  # fmt: skip
    return BlockInputs(x, None, Decision(chosen, logit, keep) if router else None)


@torch.library.custom_op("tokendepth::decode_block", mutates_args=("h",))
def _block(
    h: Tensor, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor, window: int, columns: Tensor,
    active: Tensor | None, gate: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    heads: int, query: Tensor, w_out: Tensor, norm: Tensor, norm_bias: Tensor | None, eps: float, up: Tensor,
    up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, activation: str, query_bias: Tensor | None,
    query_norm: Tensor | None, query_eps: float, out_bias: Tensor | None,
) -> None:  # fmt: skip
    batch, _, d = h.shape
    if not batch:
        return
    assert h.is_contiguous()
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1, "a head's width must be contiguous"
    (q_out, _), ff, width, kv_heads = query.shape, down.shape[1], keys.shape[3], keys.shape[1]
    launch, programs = _launch(h), _programs(h.device)
    met, arrived = _counters(h.device, programs)
    assert batch * heads <= len(arrived)
    split = min(MOST_KEYS, max(KEYS, triton.next_power_of_2(-(-window * batch * heads // programs))))
    splits = triton.cdiv(window, split)
    q, partial = (h.new_empty(batch, n, dtype=torch.float32) for n in (q_out, heads * splits * (width + 2)))
    states = h.new_empty(batch, d, dtype=torch.float32)
    attended, hidden = h.new_empty(batch, q_out), h.new_empty(batch, ff)
    flags = seen.view(torch.uint8)
    rotate = cos is not None and sin is not None
    given = (h if tensor is None else tensor for tensor in (query_bias, query_norm))
    with torch.cuda.device_of(h):
        _work[(programs,)](
            h, x.contiguous(), keys, values, flags, columns.contiguous(), _flags(active, flags),
            h if gate is None else gate.contiguous(), *((cos.contiguous(), sin.contiguous()) if rotate else (h, h)),
            width // 2 if rotate and len(cos) > 1 else 0, query, *given, query_eps, w_out,
            h if out_bias is None else out_bias, norm, norm if norm_bias is None else norm_bias, eps, up,
            h if up_bias is None else up_bias, down, h if down_bias is None else down_bias, q, partial, attended,
            states, hidden, met, arrived, batch, 1.4426950408889634 * width**-0.5, *keys.stride()[:3], seen.stride(0),
            ALL=active is None, GATE=gate is not None, VALID=True, QUERY_BIAS=query_bias is not None,
            QUERY_NORM=query_norm is not None, ROTATE=rotate, OUT_BIAS=out_bias is not None, RMS=norm_bias is None,
            UP_BIAS=up_bias is not None, DOWN_BIAS=down_bias is not None, ACTIVATION=ACTIVATIONS.index(activation),
            D=d, HEADS=heads, SHARING=heads // kv_heads, HALF=width // 2, FF=ff, SPLIT=split, SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_W=triton.next_power_of_2(width), KEYS=KEYS,
            BLOCK_B=triton.next_power_of_2(batch), BLOCK_Q=_columns(q_out, programs, batch),
            BLOCK_O=_columns(d, programs, batch), BLOCK_U=_columns(ff, programs, batch), LINES=_lines(d),
            Q_LINES=_lines(q_out), FF_LINES=_lines(ff), FETCH=h.is_cuda, **overlapped(h), **launch,
        )  # fmt: skip


def block(h, x, layer, columns, active, weights: BlockWeights, gate, rotation) -> Tensor:
    """As `reference`, without asking the host how many tokens are active."""
    check_kernel(h, layer.keys.shape[3])
    h = h.contiguous()
    given = [w.contiguous() if isinstance(w, Tensor) else w for w in weights[:-1]]
    _block(h, x, *layer, columns, active, gate, *(rotation or (None, None)), *given)
    return h
