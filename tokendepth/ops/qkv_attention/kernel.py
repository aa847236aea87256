"""Each program handles a tile of rows, for one head of one sequence, and loops over tiles of keys.

The two halves of a head are rotated with each other, so queries and keys are two tiles each. Keys are normalised and
rotated again for every tile of rows that sees them, which for short sequences is cheaper than writing them to memory.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

TILES = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


@triton.jit
def _halves(
    rows, row, there, scale, cos, sin, eps,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Both halves of a head for some rows, normalised and rotated, in float32."""
    unit = tl.arange(0, BLOCK_H)
    known = there[:, None] & (unit < HALF)[None, :]
    at = row.to(tl.int64)[:, None] * STRIDE + unit[None, :]
    first = tl.load(rows + at, mask=known, other=0.0).to(tl.float32)
    second = tl.load(rows + at + HALF, mask=known, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = 1.0 / tl.sqrt(square / (2 * HALF) + eps)
        first *= factor[:, None] * tl.load(scale + unit, mask=unit < HALF, other=0.0).to(tl.float32)[None, :]
        second *= factor[:, None] * tl.load(scale + HALF + unit, mask=unit < HALF, other=0.0).to(tl.float32)[None, :]
    if TURN:
        at = row.to(tl.int64)[:, None] * HALF + unit[None, :]
        c = tl.load(cos + at, mask=known, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=known, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    return first, second


@triton.jit
def _attention(
    qkv, scale_q, scale_k, cos, sin, starts, out, temperature, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    NORM: tl.constexpr, TURN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first_row = begin + tl.program_id(1) * BLOCK_M
    if first_row < end:
        WIDTH: tl.constexpr = 2 * HALF
        STRIDE: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
        own = first_row + tl.arange(0, BLOCK_M)
        there = own < end
        q_first, q_second = _halves(
            qkv + head * WIDTH, own, there, scale_q, cos, sin, eps, HALF, BLOCK_H, NORM, TURN, STRIDE
        )
        q_first = (q_first * temperature).to(qkv.dtype.element_ty)
        q_second = (q_second * temperature).to(qkv.dtype.element_ty)
        keys = qkv + (HEADS + head // (HEADS // KV_HEADS)) * WIDTH
        values = keys + KV_HEADS * WIDTH
        unit = tl.arange(0, BLOCK_W)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        for start in range(begin, tl.minimum(first_row + BLOCK_M, end), BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            known = row < end
            k_first, k_second = _halves(keys, row, known, scale_k, cos, sin, eps, HALF, BLOCK_H, NORM, TURN, STRIDE)
            scores = tl.dot(q_first, tl.trans(k_first.to(qkv.dtype.element_ty)), input_precision="ieee")
            scores = tl.dot(q_second, tl.trans(k_second.to(qkv.dtype.element_ty)), scores, input_precision="ieee")
            scores = tl.where(row[None, :] <= own[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every row sees a key in the first tile
            p = tl.exp2(scores - new_top[:, None])
            fade = tl.exp2(top - new_top)
            value_at = row.to(tl.int64)[:, None] * STRIDE + unit[None, :]
            v = tl.load(values + value_at, mask=known[:, None] & (unit < WIDTH)[None, :], other=0.0)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            top = new_top
        let_next_begin(OVERLAP)
        at = own.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + unit[None, :]
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=there[:, None] & (unit < WIDTH)[None, :])


@torch.library.custom_op("tokendepth::qkv_attention", mutates_args=())
def qkv_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    starts: Tensor,
    longest: int,
    scale_q: Tensor | None,
    scale_k: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """qkv: `[n, (heads + 2 x kv heads) x width]`, rows of all sequences, concatenated -> `[n, heads x width]`.

    starts: `[batch + 1]`, int32, where the rows of each sequence begin, and n. Rows of a sequence beyond `longest` are
    not written. scale_q, scale_k, eps: for the norms of queries and keys, None if there are none. cos, sin:
    `[n, width / 2]`, None without rotation.
    """
    width = qkv.shape[1] // (heads + 2 * kv_heads)
    check_kernel(qkv, width // 2)
    qkv, out = qkv.contiguous(), qkv.new_empty(len(qkv), heads * width)
    given = [qkv if part is None else part.contiguous() for part in (scale_q, scale_k, cos, sin)]
    if len(qkv):
        with torch.cuda.device_of(qkv):
            _attention[((len(starts) - 1) * heads, triton.cdiv(longest, TILES["BLOCK_M"]))](
                qkv, *given, starts, out, 1.4426950408889634 * width**-0.5, eps,
                HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, BLOCK_H=triton.next_power_of_2(width // 2),
                BLOCK_W=triton.next_power_of_2(width), NORM=scale_q is not None, TURN=cos is not None,
                **overlapped(out), **TILES,
            )  # fmt: skip
    return out


@qkv_attention.register_fake
def _(qkv, heads, kv_heads, *_):
    return qkv.new_empty(len(qkv), qkv.shape[1] // (heads + 2 * kv_heads) * heads)
