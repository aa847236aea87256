"""One kernel: one program per multiprocessor, all resident at once, with a grid-wide barrier between the block's steps.

Returns at once if no token is active. With one kernel per step, even empty launches would take a third of the time that
loading the block's weights takes.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.few_rows.kernel import (
    columns_of,
    count,
    counters,
    fetch,
    flags_of,
    launch,
    lines_of,
    place_of,
    product,
    programs_at_once,
    rows,
)
from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped
from tokendepth.ops.rows.kernel import ACTIVATIONS, _gelu, _gelu_tanh, _silu
from tokendepth.ops.sparse_block import BlockWeights

KEYS = 128
"""Keys that are attended to at once."""
FEWEST_PARTS = 64
"""Attention rows are split for at least this many programs, even if fewer run."""


@triton.jit
def _wait_for_all(met):
    """A grid-wide barrier: programs wait here for all others, and then see what those have written.

    `met` only grows, by the number of programs at each barrier, so it never has to be reset.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64)
    before = tl.atomic_add(met, 1, sem="release")
    until = (before // programs + 1) * programs
    while tl.atomic_add(met, 0, sem="acquire") < until:
        pass
    tl.debug_barrier()


@triton.jit
def _query(
    q, at, norm, eps, cos, sin, turn,
    HALF: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One head's projected query, normalised and rotated."""
    unit = tl.arange(0, BLOCK_W)
    known = unit < 2 * HALF
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
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Over the keys from `begin` to `end`: the largest score, and sum and weighted values relative to it."""
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
        fine = fine & ((tl.load(seen + key, fine, 0) != 0) | (key == own))
        scores = tl.where(fine, tl.sum(k_tile.to(tl.float32) * q[None, :], 1) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet
        p, fade = tl.exp2(scores - safe), tl.exp2(top - safe)
        total = total * fade + tl.sum(p, 0)
        acc = acc * fade + tl.sum(p[:, None] * v_tile.to(tl.float32), 0)
        top = new_top
    return tl.max(top, 0), tl.max(total, 0), acc


@triton.jit
def _attend_part(
    q, norm, eps, cos, sin, turn, keys, values, seen, own, part, split, line, scale, column_stride,
    partial, arrived, attended,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One part, `split` keys, of the attention row `line` (of one head); the last part to finish combines them."""
    WIDTH: tl.constexpr = 2 * HALF
    begin, unit = part * split, tl.arange(0, BLOCK_W)
    if begin <= own:
        turned = _query(q, line * WIDTH, norm, eps, cos, sin, turn, HALF, NORM, ROTATE, BLOCK_W)
        end = tl.minimum(begin + split, own + 1)
        top, total, acc = _attend(
            turned, keys, values, seen, own, begin, end, scale, column_stride, WIDTH, BLOCK_W, KEYS
        )
        parts, to = own // split + 1, attended + line * WIDTH + unit
        if parts == 1:
            tl.store(to, (acc / total).to(attended.dtype.element_ty), unit < WIDTH)
        else:
            mine = partial + (line * SPLITS + part) * (WIDTH + 2)
            tl.store(mine, top)
            tl.store(mine + 1, total)
            tl.store(mine + 2 + unit, acc, unit < WIDTH)
            tl.debug_barrier()  # all threads store before the counter is incremented
            if tl.atomic_add(arrived + line, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived + line, 0)  # reset for the next kernel
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


@triton.jit
def _update(
    source, w, bias, residual, BY_PLACE: tl.constexpr, out, TO_PLACE: tl.constexpr, gate, active, working, batch, eps,
    K: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ALL: tl.constexpr, RMS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """residual + gate * (source w^T + bias). source is indexed by row, residual and out by place or by row."""
    for tile in range(tl.program_id(0), tl.cdiv(D, BLOCK_O), tl.num_programs(0)):
        column = tile * BLOCK_O + tl.arange(0, BLOCK_O)
        wanted = column < D
        for first in range(0, working, BLOCK_M):
            place, there, _ = rows(active, first, batch, ALL, BLOCK_B, BLOCK_M)
            row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
            found = product(
                source, row * K, there, eps, source, source, w, column, wanted,
                False, False, RMS, K, BLOCK_M, BLOCK_O, BLOCK_K,
            )  # fmt: skip
            if BIAS:
                found += tl.load(bias + column, wanted, 0.0).to(tl.float32)[None, :]
            if GATE:
                found *= tl.load(gate + place, there, 0.0).to(tl.float32)[:, None]
            inside = there[:, None] & wanted[None, :]
            before = residual + (place if BY_PLACE else row)[:, None] * D + column[None, :]
            found += tl.load(before, inside, 0.0, cache_modifier=".cg").to(tl.float32)
            to = out + (place if TO_PLACE else row)[:, None] * D + column[None, :]
            tl.store(to, found.to(out.dtype.element_ty), inside)


@triton.jit
def _work(
    h, x, keys, values, seen, columns, active, gate, cos, sin, turns,
    query, query_bias, query_norm, query_eps, w_out, out_bias, norm, norm_bias, eps, up, up_bias, down, down_bias,
    q, partial, attended, states, hidden, met, arrived, batch, window, spread, scale,
    slot_stride, head_stride, column_stride, seen_stride,
    ALL: tl.constexpr, GATE: tl.constexpr, QUERY_BIAS: tl.constexpr, QUERY_NORM: tl.constexpr,
    ROTATE: tl.constexpr, OUT_BIAS: tl.constexpr, RMS: tl.constexpr, UP_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, SHARING: tl.constexpr, HALF: tl.constexpr,
    FF: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, Q_LINES: tl.constexpr,
    FF_LINES: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """spread: number of programs for which attention rows are split; the last of a row's parts combines them."""
    after_previous(OVERLAP)
    working = count(active, batch, ALL, BLOCK_B)
    if working > 0:
        WIDTH: tl.constexpr = 2 * HALF
        Q: tl.constexpr = HEADS * WIDTH
        GATED: tl.constexpr = ACTIVATION >= 2
        program, programs = tl.program_id(0), tl.num_programs(0)
        if FETCH:  # load all weights of the block while its steps wait for each other
            fetch(query, program * BLOCK_Q, Q, BLOCK_Q, D, BLOCK_Q * LINES)
            fetch(w_out, program * BLOCK_O, D, BLOCK_O, Q, BLOCK_O * Q_LINES)
            fetch(up, program * BLOCK_U, FF, BLOCK_U, D, BLOCK_U * LINES)
            if GATED:
                fetch(up + FF * D, program * BLOCK_U, FF, BLOCK_U, D, BLOCK_U * LINES)
            fetch(down, program * BLOCK_O, D, BLOCK_O, FF, BLOCK_O * FF_LINES)
        let_next_begin(OVERLAP)
        for tile in range(program, tl.cdiv(Q, BLOCK_Q), programs):
            column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
            wanted = column < Q
            for first in range(0, working, BLOCK_M):
                place, there, _ = rows(active, first, batch, ALL, BLOCK_B, BLOCK_M)
                found = product(
                    x, place * D, there, eps, x, x, query, column, wanted,
                    False, False, RMS, D, BLOCK_M, BLOCK_Q, BLOCK_K,
                )  # fmt: skip
                if QUERY_BIAS:
                    found += tl.load(query_bias + column, wanted, 0.0).to(tl.float32)[None, :]
                row = first + tl.arange(0, BLOCK_M)
                tl.store(q + row[:, None] * Q + column[None, :], found, there[:, None] & wanted[None, :])
        _wait_for_all(met)
        wanted_parts = tl.maximum(1, spread // (working * HEADS))
        split = tl.cdiv(tl.cdiv(window, wanted_parts), KEYS) * KEYS  # keys of a row that one program takes
        splits = tl.cdiv(window, split)
        for item in range(program, working * HEADS * splits, programs):
            line = item // splits
            slot = place_of(active, line // HEADS, batch, ALL, BLOCK_B)
            head_at = slot * slot_stride + line % HEADS // SHARING * head_stride
            _attend_part(
                q, query_norm, query_eps, cos, sin, slot * turns, keys + head_at, values + head_at,
                seen + slot * seen_stride, tl.load(columns + slot), item % splits, split, line, scale, column_stride,
                partial, arrived, attended, HEADS, HALF, QUERY_NORM, ROTATE, SPLITS, BLOCK_S, BLOCK_W, KEYS,
            )  # fmt: skip
        _wait_for_all(met)
        _update(
            attended, w_out, out_bias, h, True, states, False, gate, active, working, batch, eps,
            Q, D, OUT_BIAS, GATE, ALL, RMS, BLOCK_B, BLOCK_M, BLOCK_O, BLOCK_K,
        )  # fmt: skip
        _wait_for_all(met)
        for tile in range(program, tl.cdiv(FF, BLOCK_U), programs):
            unit = tile * BLOCK_U + tl.arange(0, BLOCK_U)
            known = unit < FF
            for first in range(0, working, BLOCK_M):
                row = first + tl.arange(0, BLOCK_M)
                there = row < working
                made = product(
                    states, row * D, there, eps, norm, norm_bias, up, unit, known,
                    True, True, RMS, D, BLOCK_M, BLOCK_U, BLOCK_D,
                )  # fmt: skip
                if UP_BIAS:
                    made += tl.load(up_bias + unit, known, 0.0).to(tl.float32)[None, :]
                if GATED:
                    factor = product(
                        states, row * D, there, eps, norm, norm_bias, up + FF * D, unit, known,
                        True, True, RMS, D, BLOCK_M, BLOCK_U, BLOCK_D,
                    )  # fmt: skip
                    if UP_BIAS:
                        factor += tl.load(up_bias + FF + unit, known, 0.0).to(tl.float32)[None, :]
                    made = (_silu(made) if ACTIVATION == 2 else _gelu_tanh(made)) * factor
                else:
                    made = _gelu(made)
                to = hidden + row[:, None] * FF + unit[None, :]
                tl.store(to, made.to(hidden.dtype.element_ty), there[:, None] & known[None, :])
        _wait_for_all(met)
        _update(
            hidden, down, down_bias, states, False, h, True, gate, active, working, batch, eps,
            FF, D, DOWN_BIAS, GATE, ALL, RMS, BLOCK_B, BLOCK_M, BLOCK_O, BLOCK_K,
        )  # fmt: skip


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
    programs = programs_at_once(h.device)
    met, arrived = counters(h.device, programs)
    assert batch * heads <= len(arrived)
    splits = triton.cdiv(window, KEYS)
    q, partial = (h.new_empty(batch, n, dtype=torch.float32) for n in (q_out, heads * splits * (width + 2)))
    states = h.new_empty(batch, d, dtype=torch.float32)
    attended, hidden = h.new_empty(batch, q_out), h.new_empty(batch, ff)
    flags = seen.view(torch.uint8)
    rotation = (h, h) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    given = (h if tensor is None else tensor for tensor in (query_bias, query_norm))
    with torch.cuda.device_of(h):
        _work[(programs,)](
            h, x.contiguous(), keys, values, flags, columns.contiguous(), flags_of(active, flags),
            h if gate is None else gate.contiguous(), *rotation, width // 2 if cos is not None and len(cos) > 1 else 0,
            query, *given, query_eps, w_out, h if out_bias is None else out_bias, norm,
            norm if norm_bias is None else norm_bias, eps, up, h if up_bias is None else up_bias, down,
            h if down_bias is None else down_bias, q, partial, attended, states, hidden, met, arrived, batch, window,
            max(programs, FEWEST_PARTS), 1.4426950408889634 * width**-0.5, *keys.stride()[:3], seen.stride(0),
            ALL=active is None, GATE=gate is not None, QUERY_BIAS=query_bias is not None,
            QUERY_NORM=query_norm is not None, ROTATE=cos is not None, OUT_BIAS=out_bias is not None,
            RMS=norm_bias is None, UP_BIAS=up_bias is not None, DOWN_BIAS=down_bias is not None,
            ACTIVATION=ACTIVATIONS.index(activation), D=d, HEADS=heads, SHARING=heads // kv_heads, HALF=width // 2,
            FF=ff, SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), BLOCK_W=triton.next_power_of_2(width),
            KEYS=KEYS, BLOCK_B=triton.next_power_of_2(batch), BLOCK_Q=columns_of(q_out, programs, batch),
            BLOCK_O=columns_of(d, programs, batch), BLOCK_U=columns_of(ff, programs, batch, len(up) // ff),
            LINES=lines_of(d), Q_LINES=lines_of(q_out), FF_LINES=lines_of(ff), FETCH=h.is_cuda, **overlapped(h),
            **launch(h),
        )  # fmt: skip


def kernel(h, x, layer, columns, active, weights: BlockWeights, gate, rotation) -> Tensor:
    """As `reference`, without host synchronisation."""
    check_kernel(h, layer.keys.shape[3])
    h = h.contiguous()
    given = [w.contiguous() if isinstance(w, Tensor) else w for w in weights[:-1]]
    _block(h, x, *layer, columns, active, gate, *(rotation or (None, None)), *given)
    return h
