"""One kernel forward, two backward: the gradients, then the sum of the programs' shares of the weight gradients."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

# Chosen for 8192 tokens, d = 256, hidden = 64, bfloat16 products and 132 multiprocessors. 64 rows per program give 128
# programs, one wave, and 64 is the size of Hopper's matrix instruction. d is one piece and there are enough warps that
# the tiles of h and w1 fit into registers as they arrive, so that every load is in flight before the first is used.
FORWARD = {"BLOCK_N": 64, "BLOCK_D": 256, "num_warps": 4, "num_stages": 1}
BACKWARD = {"BLOCK_N": 64, "BLOCK_D": 256, "BLOCK_K": 256, "num_warps": 8, "num_stages": 1}
# Full float32 runs without tensor cores and holds whole operands in registers; these are the largest that do not spill.
FORWARD_FULL = {"BLOCK_N": 32, "BLOCK_D": 32, "num_warps": 4, "num_stages": 2}
BACKWARD_FULL = {"BLOCK_N": 16, "BLOCK_D": 128, "BLOCK_K": 32, "num_warps": 8, "num_stages": 1}
LARGEST_TILE = 64 * 256  # of w1 and its gradient; BLOCK_D shrinks if hidden is larger
# The largest number of partial sums of the weight gradients, each as large as w1. They nearly fill the chip, and the
# reduction takes 128 as one tile.
PROGRAMS = 128
REDUCE = {"BLOCK_P": 128, "BLOCK_C": 128, "num_warps": 8}


@triton.jit
def _operand(matrix, row, rows, stride, column, columns, LOW: tl.constexpr):
    """`[row, column]` of a matrix, zero outside it, in the dtype of the products."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside)
    # Not `other=0.0` in the load: Triton would then convert the layout before rounding, with twice the traffic in
    # shared memory.
    return tl.where(inside, tile, 0.0).to(tl.bfloat16 if LOW else tl.float32)


@triton.jit
def _forward(
    h, w1, b1, w2, b2, out, rows,
    STRIDE: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, LOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    first = tl.program_id(0) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    unit = tl.arange(0, BLOCK_H)
    h += first.to(tl.int64) * STRIDE
    bias = tl.load(b1 + unit, mask=unit < HIDDEN, other=0.0)
    weight = tl.load(w2 + unit, mask=unit < HIDDEN, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    for start in range(0, D, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        w_tile = _operand(w1, unit, HIDDEN, D, column, D, LOW)  # first, so that it is rounded while h is still loading
        h_tile = _operand(h, row, rows - first, STRIDE, column, D, LOW)
        acc = tl.dot(h_tile, tl.trans(w_tile), acc, input_precision="ieee")
    acc += bias[None, :]
    hidden = tl.where(acc < 0, 0.0, acc)  # tl.maximum would hide a NaN
    let_next_begin(OVERLAP)
    tl.store(out + first + row, tl.sum(hidden * weight[None, :], 1) + tl.load(b2), mask=row < rows - first)


@triton.jit
def _backward(
    grad, h, w1, b1, w2, grad_h, partial, rows, blocks,
    STRIDE: tl.constexpr, PITCH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, LOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (i, j): the i-th group of `blocks` row blocks, the j-th piece of d; recomputes the forward.

    Its row of `partial` is its share of the gradients for w1, b1, w2 and b2, in that order. Activations are
    `[hidden, row]` here, so that sums over rows stay within a thread and one tile of h in shared memory serves two
    products.
    """
    piece = tl.program_id(1)
    row = tl.arange(0, BLOCK_N)
    unit = tl.arange(0, BLOCK_H)
    column = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    w_tile = _operand(w1, unit, HIDDEN, D, column, D, LOW)
    bias = tl.load(b1 + unit, mask=unit < HIDDEN, other=0.0)
    weight = tl.load(w2 + unit, mask=unit < HIDDEN, other=0.0)
    grad_w1 = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    grad_b1 = tl.zeros([BLOCK_H], tl.float32)
    grad_w2 = tl.zeros([BLOCK_H], tl.float32)
    grad_b2 = tl.zeros([BLOCK_N], tl.float32)
    for block in range(blocks):
        first = (tl.program_id(0) * blocks + block) * BLOCK_N
        left = rows - first
        h_block = h + first.to(tl.int64) * STRIDE
        h_tile = _operand(h_block, row, left, STRIDE, column, D, LOW)
        g = tl.load(grad + first + row, mask=row < left, other=0.0)
        acc = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if D <= BLOCK_K:
            acc = tl.dot(w_tile, tl.trans(h_tile), acc, input_precision="ieee")
        else:
            for start in range(0, D, BLOCK_K):
                other = start + tl.arange(0, BLOCK_K)
                other_w = _operand(w1, unit, HIDDEN, D, other, D, LOW)
                other_h = _operand(h_block, row, left, STRIDE, other, D, LOW)
                acc = tl.dot(other_w, tl.trans(other_h), acc, input_precision="ieee")
        acc += bias[:, None]
        hidden = tl.where(acc < 0, 0.0, acc)
        grad_acc = tl.where(acc <= 0, 0.0, weight[:, None] * g[None, :])
        grad_b1 += tl.sum(grad_acc, 1)
        grad_w2 += tl.sum(hidden * g[None, :], 1)
        grad_b2 += g
        grad_acc = grad_acc.to(h_tile.dtype)
        grad_w1 = tl.dot(grad_acc, h_tile, grad_w1, input_precision="ieee")
        grad_h_tile = tl.dot(tl.trans(grad_acc), w_tile, input_precision="ieee")
        at = grad_h + first.to(tl.int64) * D + row[:, None] * D + column[None, :]
        tl.store(at, grad_h_tile, mask=(row < left)[:, None] & (column < D)[None, :])
    partial += tl.program_id(0) * PITCH
    inside = (unit < HIDDEN)[:, None] & (column < D)[None, :]
    tl.store(partial + unit[:, None] * D + column[None, :], grad_w1, mask=inside)
    if piece == 0:
        partial += HIDDEN * D
        tl.store(partial + unit, grad_b1, mask=unit < HIDDEN)
        tl.store(partial + HIDDEN + unit, grad_w2, mask=unit < HIDDEN)
        tl.store(partial + 2 * HIDDEN, tl.sum(grad_b2, 0))


@triton.jit
def _reduce(
    partial, grad_w1, grad_b1, grad_w2, grad_b2, programs,
    PITCH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sum over the rows of `partial`, in a fixed order, split into the four gradients."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        inside = (program < programs)[:, None] & (column < PITCH)[None, :]
        acc += tl.sum(tl.load(partial + program[:, None] * PITCH + column[None, :], mask=inside, other=0.0), 0)
    tl.store(grad_w1 + column, acc, mask=column < HIDDEN * D)
    column -= HIDDEN * D
    tl.store(grad_b1 + column, acc, mask=(column >= 0) & (column < HIDDEN))
    column -= HIDDEN
    tl.store(grad_w2 + column, acc, mask=(column >= 0) & (column < HIDDEN))
    column -= HIDDEN
    tl.store(grad_b2 + column, acc, mask=column == 0)


_INTERPRETED = not isinstance(_forward, triton.JITFunction)  # TRITON_INTERPRET=1 when this module was imported


def _launch(choice: dict[str, int], w1: Tensor, low_precision: bool) -> dict[str, Any]:
    """`choice` with block sizes fitted to the tensors, and the tensors' sizes."""
    hidden, d = w1.shape
    block_h = max(16, triton.next_power_of_2(hidden))
    block_d = max(16, min(choice["BLOCK_D"], triton.next_power_of_2(d), LARGEST_TILE // block_h))
    return choice | {"D": d, "HIDDEN": hidden, "LOW": low_precision, "BLOCK_D": block_d, "BLOCK_H": block_h}


def _rows(h: Tensor) -> Tensor:
    """`[..., d] -> [tokens, d]`, each row contiguous."""
    flat = h.reshape(-1, h.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


@torch.library.custom_op("tokendepth::halting_logits", mutates_args=())
def _logits(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, low_precision: bool) -> Tensor:
    out = h.new_empty(h.shape[:-1], dtype=torch.float32)
    rows = out.numel()
    if rows:
        flat = _rows(h)
        launch = _launch(FORWARD if low_precision else FORWARD_FULL, w1, low_precision)
        launch["STRIDE"] = flat.stride(0)
        weights = w1.contiguous(), b1.contiguous(), w2.contiguous(), b2
        with torch.cuda.device_of(h):
            _forward[(triton.cdiv(rows, launch["BLOCK_N"]),)](flat, *weights, out, rows, **overlapped(h), **launch)
    return out


@_logits.register_fake
def _(h, w1, b1, w2, b2, low_precision):
    return h.new_empty(h.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("tokendepth::halting_logits_backward", mutates_args=())
def _gradients(
    grad: Tensor, h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, low_precision: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients for h, w1, b1, w2 and b2."""
    rows, (hidden, d) = grad.numel(), w1.shape
    grad_h, grad_w1, grad_b1, grad_w2, grad_b2 = out = _empty_gradients(h, w1)
    if not rows:
        return grad_h, grad_w1.zero_(), grad_b1.zero_(), grad_w2.zero_(), grad_b2.zero_()
    flat = _rows(h)
    launch = _launch(BACKWARD if low_precision else BACKWARD_FULL, w1, low_precision)
    pieces = triton.cdiv(d, launch["BLOCK_D"])
    row_blocks = triton.cdiv(rows, launch["BLOCK_N"])
    blocks = triton.cdiv(row_blocks, max(1, PROGRAMS // pieces))  # per program, evenly
    programs = triton.cdiv(row_blocks, blocks)
    width = hidden * d + 2 * hidden + 1
    pitch = -(-width // 32) * 32  # so that rows are whole cache lines
    partial = h.new_empty((int(programs), pitch), dtype=torch.float32)
    launch |= {"STRIDE": flat.stride(0), "PITCH": pitch, "BLOCK_K": min(launch["BLOCK_K"], launch["BLOCK_D"])}
    reduce: dict[str, Any] = REDUCE | {"D": d, "HIDDEN": hidden, "PITCH": pitch}
    operands = grad.contiguous(), flat, w1.contiguous(), b1.contiguous(), w2.contiguous()
    with torch.cuda.device_of(h):
        _backward[(programs, pieces)](*operands, grad_h, partial, rows, blocks, **launch)
        _reduce[(triton.cdiv(width, reduce["BLOCK_C"]),)](
            partial, grad_w1, grad_b1, grad_w2, grad_b2, programs, **reduce
        )
    return out


def _empty_gradients(h: Tensor, w1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden, d = w1.shape
    grad_h = h.new_empty(h.shape)
    return grad_h, w1.new_empty(hidden, d), w1.new_empty(hidden), w1.new_empty(1, hidden), w1.new_empty(1)


@_gradients.register_fake
def _(grad, h, w1, b1, w2, low_precision):
    return _empty_gradients(h, w1)


def _save(ctx, inputs, output) -> None:
    h, w1, b1, w2, _, ctx.low_precision = inputs
    ctx.save_for_backward(h, w1, b1, w2)


def _autograd(ctx, grad: Tensor):
    return *_gradients(grad, *ctx.saved_tensors, ctx.low_precision), None


_logits.register_autograd(_autograd, setup_context=_save)


def kernel(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, low_precision: bool = False) -> Tensor:
    """As `reference`, without writing any `[tokens, hidden]` tensor; float32 weights and logits, any sizes.

    Multiply-adds per token (two FLOPs each): forward `hidden d + hidden`; backward `3 hidden d + hidden`, of which
    `hidden d` recompute the forward (once for each piece of d: see `BACKWARD`). Bitwise reproducible: no atomics.
    With `low_precision` only the products with w1 have bfloat16 operands; the small sums with w2 stay in float32.
    """
    if not (h.is_cuda or _INTERPRETED):
        raise ValueError(f"backend 'kernel' needs a GPU, or TRITON_INTERPRET=1, not a tensor on {h.device}")
    return _logits(h, w1, b1, w2, b2, low_precision)
