"""Products of all rows by the library, and three kernels between them that leave out the rows that are not active.

What that saves is reading their keys and values, the most of a step of many slots. Their rows of the products are
computed and not used, so what goes into them may be anything. While a kernel has little to do, spare programs bring the
weights of the next product into the L2 cache.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.decode_inputs import KeyWeights, Unwritten
from tokendepth.ops.few_rows.kernel import counters, fetch, flags_of, lines_of, programs_at_once
from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, overlapped
from tokendepth.ops.rows.kernel import ACTIVATIONS, _gelu, _gelu_tanh, _silu
from tokendepth.ops.sparse_block import BlockWeights

PROGRAMS = 1024
"""Attention of a few slots is cut up for so many programs: those of the active rows fit all multiprocessors at once."""
PARTS = 4
"""Of more slots each row is cut up into so many parts at least, so that multiprocessors end at about the same time."""
LOADED = 2048
"""Numbers of keys, and as many of values, that a program asks for while it uses as many. Of width 64 that takes 96
registers, so 5 programs run on a multiprocessor, with 40 KB under way; with 4,096 it is 168, 3 and 48."""
TILE = 4096
"""At most so many numbers of keys, times the heads that share them: a running sum for each."""
MOST_SHARING = 4
"""Query heads of a program; with more, too few keys would be under way at once."""
ATTEND, ADD, ACTIVATE = {"num_warps": 4}, {"num_warps": 4}, {"num_warps": 4}
UNITS = 1024
"""Hidden units of a token that a program takes."""
PIECES = 2048
"""Of 32 bytes, of weights, that a spare program fetches."""


@triton.jit
def _is_active(active, slot, ALL: tl.constexpr):
    if ALL:
        return slot >= 0
    return tl.load(active + slot) != 0


@triton.jit
def _scaled(update, gate, slot, GATE: tl.constexpr):
    if GATE:
        update *= tl.load(gate + slot).to(tl.float32)
    return update


@triton.jit
def _turned(
    projected, at, there, bias, bias_at, norm, eps, cos, sin, turn,
    HALF: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """`[head, width]` of the projected heads that begin at `at`, normalised and turned."""
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
    """Of the keys from `begin` to `end`, by query head: the largest score, and sum and weighted values relative to it.

    The first tile is given; each next one is asked for before the last is used, so that memory never waits. Each of the
    KEYS places in a tile has a maximum and sums of its own until the end, so that threads need not meet at every tile.
    """
    top = tl.full([GROUP, KEYS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP, KEYS], tl.float32)
    acc = tl.zeros([GROUP, KEYS, BLOCK_W], tl.float32)
    for start in range(begin, end, KEYS):
        k_next, v_next, fine_next = _tile(keys, values, seen, start + KEYS, end, column_stride, WIDTH, BLOCK_W, KEYS)
        scores = tl.sum(k_tile.to(tl.float32) * q[:, None, :], 2) * scale
        scores = tl.where((fine != 0)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing was seen yet
        p, fade = tl.exp2(scores - safe), tl.exp2(top - safe)
        total = total * fade + p
        acc = acc * fade[:, :, None] + p[:, :, None] * v_tile.to(tl.float32)
        top, k_tile, v_tile, fine = new_top, k_next, v_next, fine_next
    best = tl.max(top, 1)
    weight = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)[:, None])
    return best, tl.sum(total * weight, 1), tl.sum(acc * weight[:, :, None], 1)


@triton.jit
def _with_own(q, own_key, own_value, has_own, top, total, acc, scale):
    """What `_over_keys` found, and the token's own key, which is always seen."""
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
    """Leaves one of `parts` of a token's keys; the last to end writes what all of them are together."""
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
        tl.debug_barrier()  # all threads have stored before one says so
        if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived, 0)  # for the next kernel
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

    The last of a row's parts to end puts them together. The part that the token's own column belongs to makes its key
    and value of what was projected, and writes them, of tokens that are not active too.
    turns: rows of cosines and sines from one slot to the next, 0 where all share them.
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
    own, begin, runs = tl.load(columns + slot), part * split, _is_active(active, slot, ALL)
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
        made = (zero == 0) & has_own & _is_active(among, slot, EVERYBODY)
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


@triton.jit
def _add(
    h, update, out_bias, down_bias, gate, active, norm, norm_bias, eps, normed, up, batch,
    ALL: tl.constexpr, GATE: tl.constexpr, OUT_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr, RMS: tl.constexpr,
    D: tl.constexpr, UP: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """An active row's first update, and the second norm of it; spare programs fetch `up`.

    The bias of the second update is added here, after the norm: its product is added by the library, to every row.
    """
    slot = tl.program_id(0)
    if slot >= batch:
        fetch(up, (slot - batch) * ROWS, UP, ROWS, D, LINES)
    else:
        after_previous(OVERLAP)
        if _is_active(active, slot, ALL):
            column = tl.arange(0, BLOCK_D)
            known, at = column < D, slot.to(tl.int64) * D + column
            found = tl.load(update + at, known, 0.0).to(tl.float32)
            if OUT_BIAS:
                found += tl.load(out_bias + column, known, 0.0).to(tl.float32)
            state = tl.load(h + at, known, 0.0).to(tl.float32) + _scaled(found, gate, slot, GATE)
            value = state
            if not RMS:
                value = tl.where(known, value - tl.sum(value, 0) / D, 0.0)
            value *= tl.rsqrt(tl.sum(value * value, 0) / D + eps)
            value *= tl.load(norm + column, known, 0.0).to(tl.float32)
            if not RMS:
                value += tl.load(norm_bias + column, known, 0.0).to(tl.float32)
            tl.store(normed + at, value.to(normed.dtype.element_ty), known)
            if DOWN_BIAS:
                state += _scaled(tl.load(down_bias + column, known, 0.0).to(tl.float32), gate, slot, GATE)
            tl.store(h + at, state.to(h.dtype.element_ty), known)


@triton.jit
def _activate(
    made, bias, gate, active, hidden, down, tiles,
    ALL: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr,
    FF: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Hidden units times the token's gate; 0 where it is not active. Programs beyond `tiles` fetch `down`."""
    PER_ROW: tl.constexpr = (FF + UNITS - 1) // UNITS
    tile = tl.program_id(0)
    if tile >= tiles:
        fetch(down, (tile - tiles) * ROWS, D, ROWS, FF, LINES)
    else:
        after_previous(OVERLAP)
        slot, unit = tile // PER_ROW, tile % PER_ROW * UNITS + tl.arange(0, UNITS)
        known = unit < FF
        value = tl.zeros([UNITS], tl.float32)
        if _is_active(active, slot, ALL):
            GATED: tl.constexpr = ACTIVATION >= 2
            at = made + slot.to(tl.int64) * (2 * FF if GATED else FF) + unit
            value = tl.load(at, known, 0.0).to(tl.float32)
            if BIAS:
                value += tl.load(bias + unit, known, 0.0).to(tl.float32)
            if GATED:
                factor = tl.load(at + FF, known, 0.0).to(tl.float32)
                if BIAS:
                    factor += tl.load(bias + FF + unit, known, 0.0).to(tl.float32)
                value = (_silu(value) if ACTIVATION == 2 else _gelu_tanh(value)) * factor
            else:
                value = _gelu(value)
            value = _scaled(value, gate, slot, GATE)
        tl.store(hidden + slot.to(tl.int64) * FF + unit, value.to(hidden.dtype.element_ty), known)


def _spare(w: Tensor) -> tuple[int, dict[str, int]]:
    """Programs that fetch a matrix, and the sizes that each of them takes; on a CPU there is nothing to fetch."""
    lines = lines_of(w.shape[1])
    rows = max(1, PIECES // lines)
    return triton.cdiv(len(w), rows) if w.is_cuda else 0, {"ROWS": rows, "LINES": rows * lines}


def attend(
    qkv: Tensor, layer, columns: Tensor, active: Tensor | None, w: BlockWeights, rotation, new: Unwritten
) -> Tensor:
    """`[slot, heads x width]` of what was projected, whose keys and values are left in the cache; rows that are not
    active are not written."""
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


def add(h: Tensor, update: Tensor, active: Tensor | None, gate: Tensor | None, w: BlockWeights) -> Tensor:
    """Adds to the active rows of h `[slot, d]`, and returns their second norm; the other rows are not written."""
    (batch, d), normed, (spare, sizes) = h.shape, torch.empty_like(h), _spare(w.up)
    _add[(batch + spare,)](
        h, update, h if w.out_bias is None else w.out_bias, h if w.down_bias is None else w.down_bias,
        h if gate is None else gate, flags_of(active, h), w.norm, w.norm if w.norm_bias is None else w.norm_bias, w.eps,
        normed, w.up, batch, ALL=active is None, GATE=gate is not None, OUT_BIAS=w.out_bias is not None,
        DOWN_BIAS=w.down_bias is not None, RMS=w.norm_bias is None, D=d, UP=len(w.up),
        BLOCK_D=triton.next_power_of_2(d), **sizes, **overlapped(h), **ADD,
    )  # fmt: skip
    return normed


def activate(made: Tensor, active: Tensor | None, gate: Tensor | None, w: BlockWeights) -> Tensor:
    """`[slot, d_ff]`, scaled by the gate; 0 where a row is not active."""
    batch, (d, ff), (spare, sizes) = len(made), w.down.shape, _spare(w.down)
    units = min(UNITS, triton.next_power_of_2(ff))
    hidden, tiles = made.new_empty(batch, ff), batch * triton.cdiv(ff, units)
    _activate[(tiles + spare,)](
        made, made if w.up_bias is None else w.up_bias, made if gate is None else gate, flags_of(active, made), hidden,
        w.down, tiles, ALL=active is None, GATE=gate is not None, BIAS=w.up_bias is not None,
        ACTIVATION=ACTIVATIONS.index(w.activation), D=d, FF=ff, UNITS=units, **sizes, **overlapped(made), **ACTIVATE,
    )  # fmt: skip
    return hidden


@torch.library.custom_op("tokendepth::decode_many", mutates_args=("h", "keys", "values"))
def _block(
    h: Tensor, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor, window: int, columns: Tensor,
    active: Tensor | None, gate: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    heads: int, query: Tensor, w_out: Tensor, norm: Tensor, norm_bias: Tensor | None, eps: float, up: Tensor,
    up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, activation: str, query_bias: Tensor | None,
    query_norm: Tensor | None, query_eps: float, out_bias: Tensor | None, kv_heads: int, joined: Tensor,
    key_bias: Tensor | None, key_norm: Tensor | None, key_eps: float, writes: Tensor, among: Tensor | None,
) -> None:  # fmt: skip
    if not len(h):
        return
    assert h.is_contiguous()
    w = BlockWeights(
        heads, query, w_out, norm, norm_bias, eps, up, up_bias, down, down_bias, activation, query_bias, query_norm,
        query_eps, out_bias,
    )  # fmt: skip
    new = Unwritten(KeyWeights(kv_heads, joined, key_bias, key_norm, key_eps), writes, among)
    rotation = None if cos is None or sin is None else (cos, sin)
    gate, state = None if gate is None else gate.contiguous(), h.view(len(h), -1)
    with torch.cuda.device_of(h):
        qkv, cached = torch.mm(x.reshape(state.shape), joined.t()), (keys, values, seen, window)
        attended = attend(qkv, cached, columns, active, w, rotation, new)
        normed = add(state, torch.mm(attended, w_out.t()), active, gate, w)
        hidden = activate(torch.mm(normed, up.t()), active, gate, w)
        state.addmm_(hidden, down.t())  # what is 0 changes nothing


def kernel(h, x, layer, columns, active, weights: BlockWeights, gate, rotation, new: Unwritten) -> Tensor:
    """As `decode_block`'s `reference`, without asking the host how many tokens are active."""
    check_kernel(h, layer.keys.shape[3])
    h = h.contiguous()
    given = [w.contiguous() if isinstance(w, Tensor) else w for w in weights[:-1]]
    heads, _, bias, norm, eps, joined = new.keys
    given += [heads, joined, bias, norm, eps, new.writes, new.among]
    _block(h, x, *layer, columns, active, gate, *(rotation or (None, None)), *given)
    return h
