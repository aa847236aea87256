"""Attention of one new token per slot over a cache, split over the keys (flash decoding). Inactive rows read no keys.

The part that contains a slot's own column computes the key and value from the projections, writes them (for inactive
rows, too) and uses them. The last part of a row to finish combines the parts.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.decode_inputs import Unwritten
from tokendepth.ops.few_rows.kernel import counters, fetch, flags_of, lines_of, programs_at_once
from tokendepth.ops.launch.kernel import after_previous, overlapped
from tokendepth.ops.sparse_block import BlockWeights

PROGRAMS = 1024
"""With few slots, attention is split into this many programs; those of the active rows are all resident at once."""
PARTS = 4
"""With more slots, each row is split into at least this many parts, so that multiprocessors finish together."""
LOADED = 2048
"""Elements of keys (and of values) that a program loads ahead while it uses as many. With heads of width 64 that takes
96 registers, so 5 programs run per multiprocessor, with 40 KB in flight; 4,096 would give 168, 3 and 48 KB."""
TILE = 4096
"""At most this many elements of keys, times the heads that share them, each with a running sum."""
MOST_SHARING = 4
"""Query heads per program; with more, too few keys would be in flight."""
ATTEND = {"num_warps": 4}


@triton.jit
def is_active(active, slot, ALL: tl.constexpr):
    if ALL:
        return slot >= 0
    return tl.load(active + slot) != 0


@triton.jit
def _turned(
    projected, at, there, bias, bias_at, norm, eps, cos, sin, turn,
    HALF: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """`[head, width]`: the projected heads that begin at `at`, normalised and rotated."""
    unit = tl.arange(0, BLOCK_W)
    known = unit < 2 * HALF
    inside = there[:, None] & known[None, :]
    own = tl.load(projected + at[:, None] + unit[None, :], inside, 0.0).to(tl.float32)
    if BIAS:
        own += tl.load(bias + bias_at[:, None] + unit[None, :], inside, 0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / (2 * HALF) + eps)[:, None]
        own *= scale * tl.load(norm + unit, known, 0.0).to(tl.float32)[None, :]
    if ROTATE:
        partner = tl.where(unit < HALF, unit + HALF, unit - HALF)
        other = tl.load(projected + at[:, None] + partner[None, :], inside, 0.0).to(tl.float32)
        if BIAS:
            other += tl.load(bias + bias_at[:, None] + partner[None, :], inside, 0.0).to(tl.float32)
        if NORM:
            other *= scale * tl.load(norm + partner, known, 0.0).to(tl.float32)[None, :]
        angle = turn + tl.where(unit < HALF, unit, unit - HALF)
        c = tl.load(cos + angle, known, 0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, known, 0.0).to(tl.float32)[None, :]
        own = own * c + tl.where((unit < HALF)[None, :], -other, other) * s
    return own


@triton.jit
def _tile(
    keys, values, seen, start, end, column_stride, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr
):
    """Keys and values from `start` on, `[1, key, width]`, and whether each may be seen."""
    key, unit = start + tl.arange(0, KEYS), tl.arange(0, BLOCK_W)
    there = key < end
    at = key.to(tl.int64)[None, :, None] * column_stride + unit[None, None, :]
    inside = there[None, :, None] & (unit < WIDTH)[None, None, :]
    fine = tl.load(seen + key, there, 0)
    return tl.load(keys + at, inside, 0.0), tl.load(values + at, inside, 0.0), fine


@triton.jit
def _over_keys(
    q, k_tile, v_tile, fine, keys, values, seen, begin, end, scale, column_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Over keys `begin` to `end`, per query head: the largest score, and sum and weighted values relative to it.

    The first tile is given; each next tile is loaded before the current one is used, to keep memory busy. Each of the
    KEYS places in a tile has its own maximum and sums until the end, so threads need not synchronise at every tile.
    """
    top = tl.full([GROUP, KEYS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP, KEYS], tl.float32)
    acc = tl.zeros([GROUP, KEYS, BLOCK_W], tl.float32)
    for start in range(begin, end, KEYS):
        k_next, v_next, fine_next = _tile(keys, values, seen, start + KEYS, end, column_stride, WIDTH, BLOCK_W, KEYS)
        scores = tl.sum(k_tile.to(tl.float32) * q[:, None, :], 2) * scale
        scores = tl.where((fine != 0)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet
        p, fade = tl.exp2(scores - safe), tl.exp2(top - safe)
        total = total * fade + p
        acc = acc * fade[:, :, None] + p[:, :, None] * v_tile.to(tl.float32)
        top, k_tile, v_tile, fine = new_top, k_next, v_next, fine_next
    best = tl.max(top, 1)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)[:, None])
    return best, tl.sum(total * weight, 1), tl.sum(acc * weight[:, :, None], 1)


@triton.jit
def _with_own(q, own_key, own_value, has_own, top, total, acc, scale):
    """The result of `_over_keys`, plus the token's own key, which is always seen."""
    score = tl.where(has_own, tl.sum(q * own_key, 1) * scale, float("-inf"))
    best = tl.maximum(top, score)
    safe = tl.where(best == float("-inf"), 0.0, best)
    weight, fade = tl.exp2(score - safe), tl.exp2(top - safe)
    return best, total * fade + weight, acc * fade[:, None] + weight[:, None] * own_value


@triton.jit
def _put_together(
    top, total, acc, partial, arrived, attended, line, there, part, parts,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Stores the result for one of `parts` of a token's keys; the last part to finish combines them."""
    unit = tl.arange(0, BLOCK_W)
    inside = there[:, None] & (unit < WIDTH)[None, :]
    to = attended + line[:, None] * WIDTH + unit[None, :]
    if parts == 1:
        tl.store(to, (acc / total[:, None]).to(attended.dtype.element_ty), inside)
    else:
        mine = partial + (line * SPLITS + part) * (WIDTH + 2)
        tl.store(mine, top, there)
        tl.store(mine + 1, total, there)
        tl.store(mine[:, None] + 2 + unit[None, :], acc, inside)
        tl.debug_barrier()  # all threads store before the counter is incremented
        if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived, 0)  # reset for the next kernel
            piece = tl.arange(0, BLOCK_S)
            made = there[:, None] & (piece < parts)[None, :]
            of = partial + (line[:, None] * SPLITS + piece[None, :]) * (WIDTH + 2)
            tops = tl.load(of, made, float("-inf"), cache_modifier=".cg")
            best = tl.max(tops, 1)
            weight = tl.exp2(tops - tl.where(there, best, 0.0)[:, None])
            whole = tl.sum(tl.load(of + 1, made, 0.0, cache_modifier=".cg") * weight, 1)
            known = made[:, :, None] & (unit < WIDTH)[None, None, :]
            accs = tl.load(of[:, :, None] + 2 + unit[None, None, :], known, 0.0, cache_modifier=".cg")
            found = tl.sum(accs * weight[:, :, None], 1) / whole[:, None]
            tl.store(to, found.to(attended.dtype.element_ty), inside)


@triton.jit
def _attend(
    qkv, keys, values, seen, columns, writes, active, among, query_bias, query_norm, query_eps, key_bias, key_norm,
    key_eps, cos, sin, turns, partial, arrived, attended, w_out, split, scale, slot_stride, head_stride, column_stride,
    seen_stride,
    ALL: tl.constexpr, EVERYBODY: tl.constexpr, QUERY_BIAS: tl.constexpr, QUERY_NORM: tl.constexpr,
    KEY_BIAS: tl.constexpr, KEY_NORM: tl.constexpr, ROTATE: tl.constexpr, HEADS: tl.constexpr,
    SHARING: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (part, heads, slot): GROUP query heads that share a K/V head, over `split` keys.

    The last of a row's parts to finish combines them. The part with the token's own column computes its key and value
    from the projections and writes them, for inactive tokens, too.
    turns: stride of cosines and sines from one slot to the next, 0 if all slots share them.
    """
    WIDTH: tl.constexpr = 2 * HALF
    GROUPS: tl.constexpr = (SHARING + GROUP - 1) // GROUP
    KV_HEADS: tl.constexpr = HEADS // SHARING
    ROW: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
    part, group, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line_up = slot * tl.num_programs(1) + group
    if FETCH:
        first = (line_up * SPLITS + part) * ROWS
        if first < D:
            fetch(w_out, first, D, ROWS, HEADS * WIDTH, LINES)
    after_previous(OVERLAP)
    own, begin, runs = tl.load(columns + slot), part * split, is_active(active, slot, ALL)
    has_own = (begin <= own) & (own < begin + split)
    if (begin <= own) & (runs | has_own):
        kv_head, of_head = group // GROUPS, group % GROUPS * GROUP + tl.arange(0, GROUP)
        place, end = slot.to(tl.int64), tl.where(runs, tl.minimum(begin + split, own), begin)
        at, flags = place * slot_stride + kv_head * head_stride, seen + place * seen_stride
        k_tile, v_tile, fine = _tile(keys + at, values + at, flags, begin, end, column_stride, WIDTH, BLOCK_W, KEYS)
        there, head = of_head < SHARING, kv_head * SHARING + of_head
        queries = _turned(
            qkv, slot * ROW + head * WIDTH, there, query_bias, head * WIDTH, query_norm, query_eps, cos, sin,
            slot * turns, HALF, QUERY_BIAS, QUERY_NORM, ROTATE, BLOCK_W,
        )  # fmt: skip
        top, total, acc = _over_keys(
            queries, k_tile, v_tile, fine, keys + at, values + at, flags, begin, end, scale, column_stride,
            WIDTH, GROUP, BLOCK_W, KEYS,
        )  # fmt: skip
        zero, unit = tl.zeros([1], tl.int32), tl.arange(0, BLOCK_W)
        made = (zero == 0) & has_own & is_active(among, slot, EVERYBODY)
        key_at, value_at, first = (
            zero + kv_head * WIDTH,
            zero + (KV_HEADS + kv_head) * WIDTH,
            slot * ROW + HEADS * WIDTH,
        )
        key = _turned(
            qkv, first + key_at, made, key_bias, key_at, key_norm, key_eps, cos, sin, slot * turns,
            HALF, KEY_BIAS, KEY_NORM, ROTATE, BLOCK_W,
        ).to(keys.dtype.element_ty)  # fmt: skip
        value = _turned(
            qkv, first + value_at, made, key_bias, value_at, key_norm, key_eps, cos, sin, 0,
            HALF, KEY_BIAS, False, False, BLOCK_W,
        ).to(keys.dtype.element_ty)  # fmt: skip
        to = (at + tl.load(writes + slot) * column_stride + unit)[None, :]
        writer = made[:, None] & (group % GROUPS == 0) & (unit < WIDTH)[None, :]
        tl.store(keys + to, key, writer)
        tl.store(values + to, value, writer)
        if runs:
            own_key, own_value = key.to(tl.float32), value.to(tl.float32)
            top, total, acc = _with_own(queries, own_key, own_value, has_own, top, total, acc, scale)
            _put_together(
                top, total, acc, partial, arrived + line_up, attended, slot * HEADS + head, there, part,
                own // split + 1, WIDTH, SPLITS, BLOCK_S, BLOCK_W,
            )  # fmt: skip


def attend(
    qkv: Tensor, layer, columns: Tensor, active: Tensor | None, w: BlockWeights, rotation, new: Unwritten
) -> Tensor:
    """`[slot, heads x width]` from the projections `qkv`; also writes keys and values to the cache. Inactive rows of
    the result are not written."""
    keys, values, seen, window = layer
    (batch, kv_heads, _, width), flags = keys.shape, seen.view(torch.uint8)
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1, "a head's width must be contiguous"
    sharing, block_w = w.heads // kv_heads, triton.next_power_of_2(width)
    group = min(MOST_SHARING, triton.next_power_of_2(sharing))
    at_once, lines = max(16, min(LOADED, TILE // group) // block_w), kv_heads * triton.cdiv(sharing, group)
    parts = max(PARTS, triton.cdiv(PROGRAMS, batch * lines))
    split = triton.cdiv(triton.cdiv(window, parts), at_once) * at_once
    splits = triton.cdiv(window, split)
    _, arrived = counters(qkv.device, programs_at_once(qkv.device))
    assert batch * lines <= len(arrived)
    partial = qkv.new_empty(batch * w.heads * splits, width + 2, dtype=torch.float32)
    attended, d, given = qkv.new_empty(batch, w.heads * width), len(w.out), new.keys
    cos, sin = (qkv, qkv) if rotation is None else rotation
    rows = triton.next_power_of_2(triton.cdiv(d, batch * lines * splits))
    _attend[(splits, lines, batch)](
        qkv, keys, values, flags, columns.contiguous(), new.writes.contiguous(), flags_of(active, flags),
        flags_of(new.among, flags), qkv if w.query_bias is None else w.query_bias,
        qkv if w.query_norm is None else w.query_norm, w.query_eps, qkv if given.bias is None else given.bias,
        qkv if given.norm is None else given.norm, given.eps,
        cos.contiguous(), sin.contiguous(), width // 2 if rotation is not None and len(cos) > 1 else 0, partial,
        arrived, attended, w.out, split, 1.4426950408889634 * width**-0.5, *keys.stride()[:3], seen.stride(0),
        ALL=active is None, EVERYBODY=new.among is None, QUERY_BIAS=w.query_bias is not None,
        QUERY_NORM=w.query_norm is not None, KEY_BIAS=given.bias is not None, KEY_NORM=given.norm is not None,
        ROTATE=rotation is not None, HEADS=w.heads, SHARING=sharing, GROUP=group, HALF=width // 2, SPLITS=splits, D=d,
        BLOCK_S=triton.next_power_of_2(splits), BLOCK_W=block_w, KEYS=at_once, ROWS=rows,
        LINES=rows * lines_of(w.out.shape[1]), FETCH=qkv.is_cuda, **overlapped(qkv), **ATTEND,
    )  # fmt: skip
    return attended
