"""Four kernels where a row of d fits in one tile, seven where it does not; each works on as many rows as are active.

The number of active rows is known on the device only. A grid is as large as if all were active, and programs beyond the
count return at once.
"""

# A launch takes numbers for constexpr and options that are no parameters: more than a type checker can know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_TILE = 256
"""Up to this d, a power of two, output projection, norm and feed-forward are one kernel."""
QUERY = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
ATTENTION = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
FINISH = {"BLOCK_M": 64, "BLOCK_F": 64, "num_warps": 8, "num_stages": 2}
WIDE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
GROUP = 8  # row blocks that share their tiles of the weights in the second-level cache


@triton.jit
def _compact(active, index, starts, batch, time, BLOCK: tl.constexpr):
    """Program b: the active tokens of sequence b, written to their part of `index`, which begins at `starts[b]`."""
    b = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    before = 0
    for start in range(0, b * time, BLOCK):
        flags = tl.load(active + start + offset, mask=start + offset < b * time, other=0).to(tl.int32)
        before += tl.sum(flags, 0)
    tl.store(starts + b, before)
    for start in range(0, time, BLOCK):
        place = start + offset
        flags = tl.load(active + b * time + place, mask=place < time, other=0).to(tl.int32)
        at = before + tl.cumsum(flags, 0) - flags
        tl.store(index + at, b * time + place, mask=(place < time) & (flags != 0))
        before += tl.sum(flags, 0)
    if b == batch - 1:
        tl.store(starts + batch, before)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _linear(
    x, w, bias, residual, keep, out, index, count,
    K: tl.constexpr, OUT: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    RESIDUAL: tl.constexpr, KEEP: tl.constexpr, SCATTER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Row r of the active ones: residual + keep * f(x w^T + bias).

    GATHER: x is by place, else by row. RESIDUAL: 1 by row, 2 by place. SCATTER: out is by place, else by row.
    """
    rows = tl.load(count)
    columns: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    blocks = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    if pid < blocks * columns:
        group = pid // (GROUP * columns)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        row = (group * GROUP + pid % (GROUP * columns) % size) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = pid % (GROUP * columns) // size * BLOCK_N + tl.arange(0, BLOCK_N)
        there, wanted = row < rows, column < OUT
        place = tl.load(index + row, mask=there, other=0).to(tl.int64)
        row = row.to(tl.int64)
        source = place if GATHER else row
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_tile = tl.load(x + source[:, None] * K + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
            w_tile = tl.load(w + column[:, None] * K + k[None, :], mask=wanted[:, None] & (k < K)[None, :], other=0.0)
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if GELU:
            acc = _gelu(acc)
        if KEEP:
            acc *= tl.load(keep + place, mask=there, other=0.0).to(tl.float32)[:, None]
        inside = there[:, None] & wanted[None, :]
        if RESIDUAL:
            source = place if RESIDUAL == 2 else row
            acc += tl.load(residual + source[:, None] * OUT + column[None, :], mask=inside, other=0.0).to(tl.float32)
        target = place if SCATTER else row
        tl.store(out + target[:, None] * OUT + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attention(
    q, k, v, valid, out, index, starts, time, keys, scale, k_batch, k_head, k_time, v_batch, v_head, v_time,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, VALID: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (m, b and head): the m-th block of active rows of a sequence, against its keys up to the last of them."""
    b = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first, last = tl.load(starts + b), tl.load(starts + b + 1)
    if first + tl.program_id(0) * BLOCK_M < last:
        row = first + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = row < last
        unit = tl.arange(0, BLOCK_W)
        own = tl.load(index + row, mask=there, other=b * time) - b * time + keys - time
        end = tl.max(own, 0) + 1
        at = row.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + unit[None, :]
        inside = there[:, None] & (unit < WIDTH)[None, :]
        q_tile = tl.load(q + at, mask=inside, other=0.0)
        k += b.to(tl.int64) * k_batch + head * k_head
        v += b.to(tl.int64) * v_batch + head * v_head
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        for start in range(0, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            known = (key < end)[:, None] & (unit < WIDTH)[None, :]
            k_tile = tl.load(k + key[:, None] * k_time + unit[None, :], mask=known, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
            seen = key[None, :] <= own[:, None]
            if VALID:
                fine = tl.load(valid + b * keys + key, mask=key < end, other=0) != 0
                seen = seen & (fine[None, :] | (key[None, :] == own[:, None]))
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
            p = tl.exp2(scores - safe[:, None])
            fade = tl.exp2(top - safe)
            v_tile = tl.load(v + key[:, None] * v_time + unit[None, :], mask=known, other=0.0)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision="ieee")
            top = new_top
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_tile(x, weight, bias, column, D: tl.constexpr):
    x = x - (tl.sum(x, 1) / D)[:, None]
    x *= tl.rsqrt(tl.sum(x * x, 1) / D + 1e-5)[:, None]
    return x * tl.load(weight + column).to(tl.float32)[None, :] + tl.load(bias + column).to(tl.float32)[None, :]


@triton.jit
def _finish(
    attended, h, keep, w_out, norm, norm_bias, w_up, b_up, w_down, b_down, out, index, count,
    D: tl.constexpr, FF: tl.constexpr, KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Output projection, norm and feed-forward of a block of rows; its hidden layer never leaves the chip."""
    rows = tl.load(count)
    if tl.program_id(0) * BLOCK_M < rows:
        row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = row < rows
        column = tl.arange(0, D)
        place = tl.load(index + row, mask=there, other=0).to(tl.int64)
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        a_tile = tl.load(attended + at, mask=there[:, None], other=0.0)
        o_tile = tl.load(w_out + column[:, None] * D + column[None, :])
        update = tl.dot(a_tile, tl.trans(o_tile), input_precision="ieee")
        at = place[:, None] * D + column[None, :]
        state = tl.load(h + at, mask=there[:, None], other=0.0).to(tl.float32)
        weight = tl.full([BLOCK_M], 1.0, tl.float32)
        if KEEP:
            weight = tl.load(keep + place, mask=there, other=0.0).to(tl.float32)
        state += weight[:, None] * update
        normed = _norm_tile(state, norm, norm_bias, column, D).to(h.dtype.element_ty)
        update = tl.zeros([BLOCK_M, D], tl.float32)
        for start in range(0, FF, BLOCK_F):
            unit = start + tl.arange(0, BLOCK_F)
            inside = (unit < FF)[:, None]
            up_tile = tl.load(w_up + unit[:, None] * D + column[None, :], mask=inside, other=0.0)
            hidden = tl.dot(normed, tl.trans(up_tile), input_precision="ieee")
            hidden = _gelu(hidden + tl.load(b_up + unit, mask=unit < FF, other=0.0).to(tl.float32)[None, :])
            down_tile = tl.load(w_down + column[None, :] * FF + unit[:, None], mask=inside, other=0.0)
            update = tl.dot(hidden.to(down_tile.dtype), down_tile, update, input_precision="ieee")
        state += weight[:, None] * (update + tl.load(b_down + column).to(tl.float32)[None, :])
        tl.store(out + at, state.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def _norm(x, weight, bias, out, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count):
        column = tl.arange(0, BLOCK_D)
        inside = column < D
        value = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - tl.sum(value, 0) / D, 0.0)
        value *= tl.rsqrt(tl.sum(value * value, 0) / D + 1e-5)
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * D + column, value.to(out.dtype.element_ty), mask=inside)


def _rows_linear(x, w, out, index, count, config, *, bias=None, residual=None, by_place=False, keep=None, gather=False,
                 gelu=False, scatter=False) -> None:  # fmt: skip
    features, k = w.shape
    launch = {**config, "BLOCK_K": min(config["BLOCK_K"], triton.next_power_of_2(k))}
    launch["BLOCK_N"] = min(config["BLOCK_N"], max(16, triton.next_power_of_2(features)))
    grid = (triton.cdiv(len(index), launch["BLOCK_M"]) * triton.cdiv(features, launch["BLOCK_N"]),)
    kind = 0 if residual is None else 2 if by_place else 1
    _linear[grid](
        x, w, w if bias is None else bias, x if residual is None else residual, x if keep is None else keep, out, index,
        count, K=k, OUT=features, GATHER=gather, BIAS=bias is not None, GELU=gelu, RESIDUAL=kind, KEEP=keep is not None,
        SCATTER=scatter, GROUP=GROUP, **launch,
    )  # fmt: skip


@torch.library.custom_op("tokendepth::active_block", mutates_args=())
def _active_block(
    h: Tensor, x: Tensor, k: Tensor, v: Tensor, active: Tensor, query: Tensor, w_out: Tensor, norm: Tensor,
    norm_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, keep: Tensor | None,
    key_valid: Tensor | None,
) -> Tensor:  # fmt: skip
    batch, time, d = h.shape
    heads, keys, width = k.shape[1:]
    tokens = batch * time
    out = h.clone(memory_format=torch.contiguous_format)
    if not tokens:
        return out
    h, x = h.contiguous(), x.contiguous()
    assert k.stride(3) == v.stride(3) == 1, "a head's width must be contiguous"
    index = torch.empty(tokens, dtype=torch.int32, device=h.device)
    starts = torch.empty(batch + 1, dtype=torch.int32, device=h.device)
    count = starts[batch:]
    keep = None if keep is None else keep.contiguous()
    q, attended = h.new_empty(tokens, d), h.new_empty(tokens, d)
    small = d <= LARGEST_TILE and d == triton.next_power_of_2(d)
    with torch.cuda.device_of(h):
        flags = active.contiguous().view(torch.uint8)
        _compact[(batch,)](flags, index, starts, batch, time, BLOCK=min(1024, triton.next_power_of_2(time)))
        _rows_linear(x, query, q, index, count, QUERY if small else WIDE, gather=True)
        valid = flags if key_valid is None else key_valid.contiguous().view(torch.uint8)
        _attention[(triton.cdiv(time, ATTENTION["BLOCK_M"]), batch * heads)](
            q, k, v, valid, attended, index, starts, time, keys, 1.4426950408889634 * width**-0.5,
            *k.stride()[:3], *v.stride()[:3], HEADS=heads, WIDTH=width, BLOCK_W=max(16, triton.next_power_of_2(width)),
            VALID=key_valid is not None, **ATTENTION,
        )  # fmt: skip
        if small:
            _finish[(triton.cdiv(tokens, FINISH["BLOCK_M"]),)](
                attended, h, h if keep is None else keep, w_out, norm, norm_bias, up, up_bias, down, down_bias, out,
                index, count, D=d, FF=up.shape[0], KEEP=keep is not None, **FINISH,
            )  # fmt: skip
            return out
        states, normed, hidden = h.new_empty(tokens, d), q, h.new_empty(tokens, up.shape[0])
        _rows_linear(attended, w_out, states, index, count, WIDE, residual=h, by_place=True, keep=keep)
        _norm[(tokens,)](states, norm, norm_bias, normed, count, D=d, BLOCK_D=triton.next_power_of_2(d), num_warps=4)
        _rows_linear(normed, up, hidden, index, count, WIDE, bias=up_bias, gelu=True)
        _rows_linear(hidden, down, out, index, count, WIDE, bias=down_bias, residual=states, keep=keep, scatter=True)
    return out


@_active_block.register_fake
def _(h, *_):
    return torch.empty_like(h, memory_format=torch.contiguous_format)


def kernel(h, x, k, v, active, weights, keep=None, key_valid=None) -> Tensor:
    """As `reference`, without asking the host how many tokens are active."""
    return _active_block(h, x, k, v, active, *(w.contiguous() for w in weights), keep, key_valid)
