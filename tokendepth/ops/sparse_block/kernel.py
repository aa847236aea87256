"""Four kernels where a row of d fits in one tile, six where it does not; each works on the active rows only.

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
from tokendepth.ops.launch import FEW_TOKENS, check_kernel, fits_one_tile
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped
from tokendepth.ops.rows.kernel import NARROW, launch_linear
from tokendepth.ops.sparse_attention.kernel import BY_FLAG, BY_LIST, EVERYBODY, attention
from tokendepth.ops.sparse_block import finds_own_rows

WIDE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
PROJECT = {"BLOCK_M": 64, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
UP = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
DOWN = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
NORM = {"BLOCK_M": 4, "num_warps": 4}
PROJECT_FEW = {"BLOCK_M": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
UP_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
DOWN_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}


@triton.jit
def _project(
    attended, w_out, h, gate, norm, norm_bias, eps, states, normed, index, count,
    D: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of the output projection, added to their states, and the second norm of the sum."""
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
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAP: tl.constexpr,
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
        value = tl.where(known, value - (tl.sum(value, 1) / D)[:, None], 0.0)
        value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        value += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        let_next_begin(OVERLAP)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _work(
    h, x, k, v, active, index, starts, query, w_out, norm, norm_bias, eps, up, up_bias, down, down_bias, gate,
    key_valid, columns, rows,
) -> None:  # fmt: skip
    """In place: at the paper's shape a copy of h would take as long as a projection of its rows.

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
    attended, states, normed = (h.new_empty(tokens, d) for _ in range(3))
    hidden = h.new_empty(tokens, up.shape[0])
    overlap = overlapped(h)
    one_tile = fits_one_tile(d)
    with torch.cuda.device_of(h):
        few = tokens <= FEW_TOKENS
        if one_tile:
            attention(x, query, k, v, key_valid, columns, attended, index, starts, active, rows)
            project = PROJECT_FEW if few else PROJECT
            project = {**project, "BLOCK_K": min(project["BLOCK_K"], d)}
            _project[(triton.cdiv(tokens, project["BLOCK_M"]),)](
                attended, w_out, h, h if gate is None else gate, norm, norm_bias, eps, states, normed, index, count,
                D=d, GATE=gate is not None, **overlap, **project,
            )  # fmt: skip
        else:
            launch_linear(x, query, normed, index, count, NARROW, gather=True)
            attention(normed, None, k, v, key_valid, columns, attended, index, starts, active, rows)
            launch_linear(attended, w_out, states, index, count, NARROW, residual=h, by_place=True, gate=gate)
            _norm[(triton.cdiv(tokens, NORM["BLOCK_M"]),)](
                states, norm, norm_bias, eps, normed, count, D=d, BLOCK_D=triton.next_power_of_2(d), **overlap, **NORM
            )
        widen, narrow = (WIDE, NARROW) if not one_tile else (UP_FEW, DOWN_FEW) if few else (UP, DOWN)
        launch_linear(normed, up, hidden, index, count, widen, bias=up_bias, gelu=True)
        launch_linear(hidden, down, h, index, count, narrow, bias=down_bias, residual=states, gate=gate, scatter=True)


@torch.library.custom_op("tokendepth::sparse_block", mutates_args=("h",))
def _sparse_block(
    h: Tensor, x: Tensor, k: Tensor, v: Tensor, active: Tensor | None, index: Tensor | None, starts: Tensor | None,
    query: Tensor, w_out: Tensor, norm: Tensor, norm_bias: Tensor, eps: float, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, gate: Tensor | None, key_valid: Tensor | None, columns: Tensor | None,
) -> None:  # fmt: skip
    weights = query, w_out, norm, norm_bias, eps, up, up_bias, down, down_bias
    rows = BY_LIST
    if index is None or starts is None:
        rows = EVERYBODY if active is None else BY_FLAG
        index, starts = empty_list(h[..., 0])
    active = None if active is None else active.contiguous()
    _work(h, x, k, v, active, index, starts, *weights, gate, key_valid, columns, rows)


def kernel(h, x, k, v, active, parts, gate=None, key_valid=None, columns=None, listed=None, rotation=None) -> Tensor:
    """As `reference`, without host synchronisation; in place, for the classic block.

    In short sequences each program finds its own rows, which saves the kernel that lists them.
    """
    weights = parts.weights
    check_kernel(h, k.shape[3])
    if weights is None or rotation is not None:
        raise ValueError("backend 'kernel' is for the block of LayerNorm, GELU and heads of their own; take 'eager'")
    h = h.contiguous()
    index, starts = listed or (None, None)
    if listed is None and not finds_own_rows(h):
        active = h.new_ones(h.shape[:2], dtype=torch.bool) if active is None else active
        index, starts = list_active(active)
    given = (w.contiguous() if isinstance(w, Tensor) else w for w in weights)
    _sparse_block(h, x, k, v, active, index, starts, *given, gate, key_valid, columns)
    return h
