"""Four kernels where a row of d fits in one tile, six where it does not; each works on as many rows as are active.

The number of active rows is known on the device only. A grid is as large as if all were active, and programs beyond the
count return at once. A row is an active token's place in the list of them, its place that in `batch x time`.
"""

# A launch takes numbers for constexpr and options that are no parameters: more than a type checker can know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokendepth.ops.backend import FEW_TOKENS, check_kernel, fits_one_tile
from tokendepth.ops.choose.kernel import empty_list, list_active, tensor_or_number
from tokendepth.ops.overlap.kernel import after_previous, let_next_begin, overlapped
from tokendepth.ops.sparse_attention.kernel import Undecided, attention

WIDE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
NARROW = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
PROJECT = {"BLOCK_M": 64, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
UP = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
DOWN = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
NORM = {"BLOCK_M": 4, "num_warps": 4}
PROJECT_FEW = {"BLOCK_M": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
UP_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
DOWN_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
GROUP = 8  # row blocks that share their tiles of the weights in the second-level cache


@triton.jit
def _gelu(x):
    """With the error function as a polynomial times an exponential, right to 1.5e-7: the library's has branches.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail *= 0.5 * tl.exp(-z * z)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def _kept(halt, place, there):
    """What the tokens at `place` keep of an update, as a column: sigmoid(-halt)."""
    return (1.0 / (1.0 + tl.exp(tl.load(halt + place, mask=there, other=0.0))))[:, None]


@triton.jit
def _linear(
    x, w, bias, residual, halt, out, index, count,
    K: tl.constexpr, OUT: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    RESIDUAL: tl.constexpr, HALT: tl.constexpr, SCATTER: tl.constexpr, BULK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Row r of the active ones: residual + sigmoid(-halt) * f(x w^T + bias).

    GATHER: x is by place, else by row. RESIDUAL: 1 by row, 2 by place. SCATTER: out is by place, else by row.
    BULK: x and w are descriptors, whose tiles the copy engine brings.
    """
    after_previous(OVERLAP)
    rows = tl.load(count)
    columns: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    blocks = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0)
    if tile < blocks * columns:
        group = tile // (GROUP * columns)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        first_row = (group * GROUP + tile % (GROUP * columns) % size) * BLOCK_M
        first_column = tile % (GROUP * columns) // size * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        there, wanted = row < rows, column < OUT
        place = tl.load(index + row, mask=there, other=0).to(tl.int64)
        row = row.to(tl.int64)
        source = place if GATHER else row
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            if BULK:
                x_tile = x.load([first_row, start])
                w_tile = w.load([first_column, start])
            else:
                k = start + tl.arange(0, BLOCK_K)
                known = (k < K)[None, :]
                x_tile = tl.load(x + source[:, None] * K + k[None, :], mask=there[:, None] & known, other=0.0)
                w_tile = tl.load(w + column[:, None] * K + k[None, :], mask=wanted[:, None] & known, other=0.0)
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if GELU:
            acc = _gelu(acc)
        if HALT:
            acc *= _kept(halt, place, there)
        inside = there[:, None] & wanted[None, :]
        if RESIDUAL:
            source = place if RESIDUAL == 2 else row
            acc += tl.load(residual + source[:, None] * OUT + column[None, :], mask=inside, other=0.0).to(tl.float32)
        let_next_begin(OVERLAP)
        target = place if SCATTER else row
        tl.store(out + target[:, None] * OUT + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _project(
    attended, w_out, h, halt, norm, norm_bias, states, normed, index, count,
    D: tl.constexpr, HALT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of the output projection, added to their states, and what the second norm makes of the sum."""
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
        if HALT:
            update *= _kept(halt, place, there)
        state = tl.load(h + place[:, None] * D + column[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        state += update
        at = row[:, None] * D + column[None, :]
        tl.store(states + at, state.to(states.dtype.element_ty), mask=there[:, None])
        state -= (tl.sum(state, 1) / D)[:, None]
        state *= tl.rsqrt(tl.sum(state * state, 1) / D + 1e-5)[:, None]
        state *= tl.load(norm + column).to(tl.float32)[None, :]
        state += tl.load(norm_bias + column).to(tl.float32)[None, :]
        let_next_begin(OVERLAP)
        tl.store(normed + at, state.to(normed.dtype.element_ty), mask=there[:, None])


@triton.jit
def _norm(
    x, weight, bias, out, count, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, OVERLAP: tl.constexpr
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
        value *= tl.rsqrt(tl.sum(value * value, 1) / D + 1e-5)[:, None]
        value *= tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        value += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
        let_next_begin(OVERLAP)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _has_copy_engine(x: Tensor) -> bool:
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)  # without a GPU: the interpreter has


def _rows_linear(x, w, out, index, count, config, *, bias=None, residual=None, by_place=False, halt=None, gather=False,
                 gelu=False, scatter=False) -> None:  # fmt: skip
    features, k = w.shape
    launch = {**config, "BLOCK_K": min(config["BLOCK_K"], max(16, triton.next_power_of_2(k)))}
    launch["BLOCK_N"] = min(config["BLOCK_N"], max(16, triton.next_power_of_2(features)))
    grid = (triton.cdiv(len(index), launch["BLOCK_M"]) * triton.cdiv(features, launch["BLOCK_N"]),)
    bulk = (
        not gather and _has_copy_engine(x) and x.data_ptr() % 16 == w.data_ptr() % 16 == k * x.element_size() % 16 == 0
    )
    operands = x, w
    if bulk:
        operands = (
            TensorDescriptor.from_tensor(x, [launch["BLOCK_M"], launch["BLOCK_K"]]),
            TensorDescriptor.from_tensor(w, [launch["BLOCK_N"], launch["BLOCK_K"]]),
        )
    given = (x if tensor is None else tensor for tensor in (bias, residual, halt))
    _linear[grid](
        *operands, *given, out, index, count, K=k, OUT=features, GATHER=gather, BIAS=bias is not None, GELU=gelu,
        RESIDUAL=0 if residual is None else 2 if by_place else 1, HALT=halt is not None, SCATTER=scatter, BULK=bulk,
        GROUP=GROUP, **overlapped(out), **launch,
    )  # fmt: skip


def _work(
    h, x, k, v, index, starts, query, w_out, norm, norm_bias, up, up_bias, down, down_bias, halt, key_valid,
    undecided=None,
) -> None:  # fmt: skip
    """In place: at the paper's shape a copy of h would take as long as a projection of its rows.

    Where it is `undecided` who is active, `index` and `starts` are written, not read.
    """
    batch, time, d = h.shape
    tokens = batch * time
    if not tokens:
        return
    x = x.contiguous()
    assert h.is_contiguous()
    assert k.stride(3) == v.stride(3) == 1, "a head's width must be contiguous"
    count = starts[batch:]
    halt = None if halt is None else halt.float().contiguous()
    attended, states, normed = (h.new_empty(tokens, d) for _ in range(3))
    hidden = h.new_empty(tokens, up.shape[0])
    overlap = overlapped(h)
    one_tile = fits_one_tile(d)
    with torch.cuda.device_of(h):
        few = tokens <= FEW_TOKENS
        if one_tile:
            attention(x, query, k, v, key_valid, attended, index, starts, undecided)
            project = PROJECT_FEW if few else PROJECT
            project = {**project, "BLOCK_K": min(project["BLOCK_K"], d)}
            _project[(triton.cdiv(tokens, project["BLOCK_M"]),)](
                attended, w_out, h, h if halt is None else halt, norm, norm_bias, states, normed, index, count,
                D=d, HALT=halt is not None, **overlap, **project,
            )  # fmt: skip
        else:
            _rows_linear(x, query, normed, index, count, NARROW, gather=True)
            attention(normed, None, k, v, key_valid, attended, index, starts)
            _rows_linear(attended, w_out, states, index, count, NARROW, residual=h, by_place=True, halt=halt)
            _norm[(triton.cdiv(tokens, NORM["BLOCK_M"]),)](
                states, norm, norm_bias, normed, count, D=d, BLOCK_D=triton.next_power_of_2(d), **overlap, **NORM
            )
        widen, narrow = (WIDE, NARROW) if not one_tile else (UP_FEW, DOWN_FEW) if few else (UP, DOWN)
        _rows_linear(normed, up, hidden, index, count, widen, bias=up_bias, gelu=True)
        _rows_linear(hidden, down, h, index, count, narrow, bias=down_bias, residual=states, halt=halt, scatter=True)


@torch.library.custom_op("tokendepth::active_block", mutates_args=("h",))
def _active_block(
    h: Tensor, x: Tensor, k: Tensor, v: Tensor, index: Tensor, starts: Tensor, query: Tensor, w_out: Tensor,
    norm: Tensor, norm_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    halt: Tensor | None, key_valid: Tensor | None,
) -> None:  # fmt: skip
    weights = query, w_out, norm, norm_bias, up, up_bias, down, down_bias
    _work(h, x, k, v, index, starts, *weights, halt, key_valid)


@torch.library.custom_op("tokendepth::chosen_block", mutates_args=("h",))
def _chosen_block(
    h: Tensor, x: Tensor, k: Tensor, v: Tensor, logit: Tensor | None, threshold: Tensor | None, number: float,
    inclusive: bool, choosable: Tensor | None, query: Tensor, w_out: Tensor, norm: Tensor, norm_bias: Tensor,
    up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, halt: Tensor | None, key_valid: Tensor | None,
) -> Tensor:  # fmt: skip
    logit = None if logit is None else logit.contiguous()
    active = h.new_empty(h.shape[:2], dtype=torch.bool)
    weights = query, w_out, norm, norm_bias, up, up_bias, down, down_bias
    undecided = Undecided(logit, threshold, number, inclusive, choosable, active)
    _work(h, x, k, v, *empty_list(active), *weights, halt, key_valid, undecided)
    return active


@_chosen_block.register_fake
def _(h, *_):
    return h.new_empty(h.shape[:2], dtype=torch.bool)


def choosing_kernel(h, x, k, v, logit, threshold, weights, halt, valid, key_valid, inclusive) -> tuple[Tensor, Tensor]:
    """As `kernel`, for who is chosen by `threshold`, or for all without a logit; returns them too.

    Each program decides for its whole sequence.
    """
    check_kernel(h, k.shape[3])
    h = h.contiguous()
    given = *tensor_or_number(threshold), inclusive, valid
    active = _chosen_block(h, x, k, v, logit, *given, *(w.contiguous() for w in weights), halt, key_valid)
    return h, active


def kernel(h, x, k, v, active, weights, halt=None, key_valid=None, listed=None) -> Tensor:
    """As `reference`, without asking the host how many tokens are active; in place."""
    check_kernel(h, k.shape[3])
    h = h.contiguous()
    index, starts = list_active(active) if listed is None else listed
    _active_block(h, x, k, v, index, starts, *(w.contiguous() for w in weights), halt, key_valid)
    return h
