"""Four kernels if a row of d fits in one tile, otherwise six or seven; each processes only the active rows.

Only the device knows the number of active rows. The grid is large enough for all tokens; programs beyond the count
return at once. `row` is an active token's index in the list of active tokens, `place` its index in `batch x time`.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.decide.kernel import empty_list, list_active
from tokendepth.ops.launch import FEW_TOKENS, check_kernel
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped
from tokendepth.ops.rows.kernel import NARROW, launch_linear
from tokendepth.ops.sparse_attention.kernel import BY_FLAG, BY_LIST, EVERYBODY, attention
from tokendepth.ops.sparse_block import BlockWeights, finds_own_rows, one_tile

WIDE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
PROJECT = {"BLOCK_M": 64, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
UP = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
DOWN = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
GATED = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
NORM = {"BLOCK_M": 4, "num_warps": 4}
TURN = {"BLOCK_M": 16, "num_warps": 4}
PROJECT_FEW = {"BLOCK_M": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
UP_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
DOWN_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}


@triton.jit
def _project(
    attended, w_out, h, gate, norm, norm_bias, eps, states, normed, index, count,
    D: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of the output projection, added to their states, and the second norm applied to the sum."""
    after_previous(OVERLAP)
    rows = tl.load(count)
    block = tl.program_id(0) * BLOCK_M
    if block < rows:
        row = block + tl.arange(0, BLOCK_M)
        there = row < rows
        column = tl.arange(0, D)
        place = tl.load(index + row, mask=there, other=0).to(tl.int64)
        row = row.to(tl.int64)
        update = tl.zeros([BLOCK_M, D], tl.float32)
        for start in range(0, D, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a_tile = tl.load(attended + row[:, None] * D + k[None, :], mask=there[:, None], other=0.0)
            w_tile = tl.load(w_out + column[:, None] * D + k[None, :])
            update = tl.dot(a_tile, tl.trans(w_tile), update, input_precision="ieee")
        if GATE:
            update *= tl.load(gate + place, mask=there, other=0.0).to(tl.float32)[:, None]
        state = tl.load(h + place[:, None] * D + column[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        state += update
        at = row[:, None] * D + column[None, :]
        tl.store(states + at, state.to(states.dtype.element_ty), mask=there[:, None])
        state -= (tl.sum(state, 1) / D)[:, None]
        state *= tl.rsqrt(tl.sum(state * state, 1) / D + eps)[:, None]
        state *= tl.load(norm + column).to(tl.float32)[None, :]
        state += tl.load(norm_bias + column).to(tl.float32)[None, :]
        let_next_begin(OVERLAP)
        tl.store(normed + at, state.to(normed.dtype.element_ty), mask=there[:, None])


@triton.jit
def _norm(
    x, weight, bias, eps, out, count,
    RMS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    rows = tl.load(count)
    block = tl.program_id(0) * BLOCK_M
    if block < rows:
        row = block + tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_D)
        known = (column < D)[None, :]
        inside = (row < rows)[:, None] & known
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            value = tl.where(known, value - (tl.sum(value, 1) / D)[:, None], 0.0)
        value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        if not RMS:
            value += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        let_next_begin(OVERLAP)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    q, norm, eps, cos, sin, index, count, time, per_sequence,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (m, head): normalises the queries of a block of rows and rotates them by their positions, in place.

    per_sequence: stride of cosines and sines from one sequence to the next, 0 if all sequences share them.
    """
    after_previous(OVERLAP)
    rows = tl.load(count)
    block = tl.program_id(0) * BLOCK_M
    if block < rows:
        row = block + tl.arange(0, BLOCK_M)
        unit = tl.arange(0, BLOCK_W)
        inside = (row < rows)[:, None] & (unit < HALF)[None, :]
        at = (row.to(tl.int64)[:, None] * HEADS + tl.program_id(1)) * (2 * HALF) + unit[None, :]
        first = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(q + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            known = unit < HALF
            first *= scale * tl.load(norm + unit, mask=known, other=0.0).to(tl.float32)[None, :]
            second *= scale * tl.load(norm + HALF + unit, mask=known, other=0.0).to(tl.float32)[None, :]
        if ROTATE:
            place = tl.load(index + row, mask=row < rows, other=0)
            turn = (place // time * per_sequence + place % time).to(tl.int64)[:, None] * HALF + unit[None, :]
            c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
            first, second = first * c - second * s, second * c + first * s
        let_next_begin(OVERLAP)
        tl.store(q + at, first.to(q.dtype.element_ty), mask=inside)
        tl.store(q + at + HALF, second.to(q.dtype.element_ty), mask=inside)


def _work(h, x, k, v, active, index, starts, w: BlockWeights, gate, key_valid, columns, rotation, rows) -> None:
    """In place, because at the paper's shape a copy of h would take as long as a projection of its rows.

    `rows`: as in `attention`.
    """
    batch, time, d = h.shape
    tokens = batch * time
    if not tokens:
        return
    x = x.contiguous()
    assert h.is_contiguous()
    assert k.stride(3) == v.stride(3) == 1, "a head's width must be contiguous"
    count = starts[batch:]
    gate = None if gate is None else gate.contiguous()
    columns = None if columns is None else columns.to(torch.int32).contiguous()
    q_out = len(w.query)
    attended, states, normed = h.new_empty(tokens, q_out), h.new_empty(tokens, d), h.new_empty(tokens, d)
    hidden = h.new_empty(tokens, w.down.shape[1])
    overlap = overlapped(h)
    whole_rows = one_tile(h, w)
    with torch.cuda.device_of(h):
        few = tokens <= FEW_TOKENS
        if whole_rows:
            attention(x, w.query, w.heads, k, v, key_valid, columns, attended, index, starts, active, rows)
            project = PROJECT_FEW if few else PROJECT
            project = {**project, "BLOCK_K": min(project["BLOCK_K"], d)}
            _project[(triton.cdiv(tokens, project["BLOCK_M"]),)](
                attended, w.out, h, h if gate is None else gate, w.norm, w.norm_bias, w.eps, states, normed, index,
                count, D=d, GATE=gate is not None, **overlap, **project,
            )  # fmt: skip
        else:
            q = h.new_empty(tokens, q_out)
            launch_linear(x, w.query, q, index, count, NARROW, bias=w.query_bias, gather=True)
            if w.query_norm is not None or rotation is not None:
                cos, sin = (q, q) if rotation is None else rotation
                _turn[(triton.cdiv(tokens, TURN["BLOCK_M"]), w.heads)](
                    q, q if w.query_norm is None else w.query_norm, w.query_eps, cos, sin, index, count, time,
                    0 if len(cos) == 1 else time, HEADS=w.heads, HALF=q_out // w.heads // 2,
                    NORM=w.query_norm is not None, ROTATE=rotation is not None,
                    BLOCK_W=triton.next_power_of_2(q_out // w.heads // 2), **overlap, **TURN,
                )  # fmt: skip
            attention(q, None, w.heads, k, v, key_valid, columns, attended, index, starts, active, rows)
            added = {"residual": h, "by_place": True, "gate": gate}
            launch_linear(attended, w.out, states, index, count, NARROW, bias=w.out_bias, **added)
            rms = w.norm_bias is None
            _norm[(triton.cdiv(tokens, NORM["BLOCK_M"]),)](
                states, w.norm, w.norm if rms else w.norm_bias, w.eps, normed, count, RMS=rms, D=d,
                BLOCK_D=triton.next_power_of_2(d), **overlap, **NORM,
            )  # fmt: skip
        widen, narrow = (WIDE, NARROW) if not whole_rows else (UP_FEW, DOWN_FEW) if few else (UP, DOWN)
        widen = widen if w.activation == "gelu" else GATED
        launch_linear(normed, w.up, hidden, index, count, widen, bias=w.up_bias, activation=w.activation)
        launch_linear(
            hidden, w.down, h, index, count, narrow, bias=w.down_bias, residual=states, gate=gate, scatter=True
        )


@torch.library.custom_op("tokendepth::sparse_block", mutates_args=("h",))
def _sparse_block(
    h: Tensor, x: Tensor, k: Tensor, v: Tensor, active: Tensor | None, index: Tensor | None, starts: Tensor | None,
    heads: int, query: Tensor, w_out: Tensor, norm: Tensor, norm_bias: Tensor | None, eps: float, up: Tensor,
    up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, activation: str, query_bias: Tensor | None,
    query_norm: Tensor | None, query_eps: float, out_bias: Tensor | None, rotary: bool, gate: Tensor | None,
    key_valid: Tensor | None, columns: Tensor | None, cos: Tensor | None, sin: Tensor | None,
) -> None:  # fmt: skip
    weights = BlockWeights(
        heads, query, w_out, norm, norm_bias, eps, up, up_bias, down, down_bias, activation, query_bias, query_norm,
        query_eps, out_bias, rotary,
    )  # fmt: skip
    rows = BY_LIST
    if index is None or starts is None:
        rows = EVERYBODY if active is None else BY_FLAG
        index, starts = empty_list(h[..., 0])
    active = None if active is None else active.contiguous()
    rotation = None if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    _work(h, x, k, v, active, index, starts, weights, gate, key_valid, columns, rotation, rows)


def kernel(h, x, k, v, active, parts, gate=None, key_valid=None, columns=None, listed=None, rotation=None) -> Tensor:
    """As `reference`, without host synchronisation; in place.

    In short sequences each program finds its own rows, which saves the kernel that lists them.
    """
    weights = parts.weights
    check_kernel(h, k.shape[3])
    if weights is None or weights.rotary != (rotation is not None):
        raise ValueError("backend 'kernel' is for a block whose weights are known; use 'eager'")
    h = h.contiguous()
    index, starts = listed or (None, None)
    if listed is None and not finds_own_rows(h, weights):
        active = h.new_ones(h.shape[:2], dtype=torch.bool) if active is None else active
        index, starts = list_active(active)
    given = (w.contiguous() if isinstance(w, Tensor) else w for w in weights)
    _sparse_block(h, x, k, v, active, index, starts, *given, gate, key_valid, columns, *(rotation or (None, None)))
    return h
