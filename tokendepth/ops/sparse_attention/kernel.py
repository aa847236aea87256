"""Attention rows of active tokens; also writes the list of active tokens if that saves a kernel."""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.decide.kernel import PREFIX, active_among
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

ATTENTION = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
BY_LIST, BY_FLAG, EVERYBODY = range(3)  # how a program knows its rows


@triton.jit
def _attend(
    q_tile, k, v, valid, own, top, total, acc, start, end, first_valid, scale, k_time, v_time,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, VALID: tl.constexpr,
):  # fmt: skip
    """One more block of keys: updates the running maximum, and the sum and weighted values relative to it."""
    key, unit = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    known = (unit < WIDTH)[None, :]
    if MASKED:
        known = known & (key < end)[:, None]
    k_tile = tl.load(k + key[:, None] * k_time + unit[None, :], mask=known, other=0.0)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    if MASKED:
        seen = key[None, :] <= own[:, None]
        if VALID:
            fine = tl.load(valid + first_valid + key, mask=key < end, other=0) != 0
            seen = seen & (fine[None, :] | (key[None, :] == own[:, None]))
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen no key yet
    p = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(top - safe)
    v_tile = tl.load(v + key[:, None] * v_time + unit[None, :], mask=known, other=0.0)
    total = total * fade + tl.sum(p, 1)
    return new_top, total, tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision="ieee")


@triton.jit
def _attention(
    q, query, k, v, valid, columns, out, index, starts, active, time, keys, scale,
    k_batch, k_head, k_time, v_batch, v_head, v_time,
    HEADS: tl.constexpr, SHARING: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERY: tl.constexpr, VALID: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
    PREFIX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (m, b and head): the m-th block of active rows in a sequence, against the keys up to the last of them.

    SHARING: query heads per K/V head. QUERY: q holds the normalised states by place, and queries are projected here;
    otherwise q holds queries by row. COLUMNS: each token's index among the keys is given; otherwise the tokens are the
    last keys. ROWS: how a program finds its rows. If not from a list, one program per sequence writes the list for the
    kernels that follow.
    """
    after_previous(OVERLAP)
    b = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    own_token = b * time + tl.arange(0, BLOCK_T)
    beyond = b * time + time
    if ROWS == 0:
        first, last = tl.load(starts + b), tl.load(starts + b + 1)
    elif ROWS == 2:
        first, last = b * time, beyond
        rank = tl.arange(0, BLOCK_T)
        flags = (own_token < beyond).to(tl.int32)
    else:
        first = 0
        for earlier in range(0, b * time, PREFIX):
            token = earlier + tl.arange(0, PREFIX)
            first += tl.sum(active_among(active, active, 0.0, active, token, b * time, 0, False, False), 0)
        flags = active_among(active, active, 0.0, active, own_token, beyond, 0, False, False)
        rank = tl.cumsum(flags, 0) - flags
        last = first + tl.sum(flags, 0)
    if ROWS != 0:  # noqa: SIM102 - constexpr: compiled only if true
        if (tl.program_id(0) == 0) & (head == 0):
            tl.store(index + first + rank, own_token, mask=flags != 0)
            tl.store(starts + b, first)
            if (b + 1) * HEADS == tl.num_programs(1):
                tl.store(starts + b + 1, last)
    k += b.to(tl.int64) * k_batch + head // SHARING * k_head
    v += b.to(tl.int64) * v_batch + head // SHARING * v_head
    block = first + tl.program_id(0) * BLOCK_M
    if block < last:
        row = block + tl.arange(0, BLOCK_M)
        there = row < last
        unit = tl.arange(0, BLOCK_W)
        D: tl.constexpr = HEADS * WIDTH
        if ROWS == 0:
            place = tl.load(index + row, mask=there, other=b * time)
        elif ROWS == 2:
            place = tl.where(there, row, b * time)
        else:  # the active token with that rank
            own_rank = (rank[None, :] == (row - first)[:, None]) & (flags != 0)[None, :]
            place = tl.sum(tl.where(own_rank, own_token[None, :], 0), 1)
            place = tl.where(there, place, b * time)
        if COLUMNS:  # noqa: SIM108 - constexpr: compiled only if true
            own = tl.load(columns + place, mask=there, other=0)
        else:
            own = place - b * time + keys - time
        end = tl.max(own, 0) + 1
        at = row.to(tl.int64)[:, None] * D + head * WIDTH + unit[None, :]
        inside = there[:, None] & (unit < WIDTH)[None, :]
        if QUERY:
            acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
            for start in range(0, D, BLOCK_D):
                feature = start + tl.arange(0, BLOCK_D)
                x_at = place.to(tl.int64)[:, None] * D + feature[None, :]
                x_tile = tl.load(q + x_at, mask=there[:, None] & (feature < D)[None, :], other=0.0)
                w_at = (head * WIDTH + unit)[:, None] * D + feature[None, :]
                w_tile = tl.load(query + w_at, mask=(unit < WIDTH)[:, None] & (feature < D)[None, :], other=0.0)
                acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
            q_tile = acc.to(q.dtype.element_ty)
        else:
            q_tile = tl.load(q + at, mask=inside, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
        # All rows see every key up to the first row's own, so no mask is needed there.
        whole = 0 if VALID else (tl.min(tl.where(there, own, end), 0) + 1) // BLOCK_N * BLOCK_N
        for start in range(0, whole, BLOCK_N):
            top, total, acc = _attend(
                q_tile, k, v, valid, own, top, total, acc, start, end, b * keys, scale, k_time, v_time,
                WIDTH, BLOCK_W, BLOCK_N, False, False,
            )  # fmt: skip
        for start in range(whole, end, BLOCK_N):
            top, total, acc = _attend(
                q_tile, k, v, valid, own, top, total, acc, start, end, b * keys, scale, k_time, v_time,
                WIDTH, BLOCK_W, BLOCK_N, True, VALID,
            )  # fmt: skip
        let_next_begin(OVERLAP)
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def attention(
    q, query, heads: int, k, v, key_valid, columns, out, index, starts, active: Tensor | None, rows: int
) -> None:
    """Writes to `out`, by row. q: queries by row, or with `query` (the projection) the normalised states by place.

    k, v: `[batch, kv head, keys, width]`; `heads` is the number of query heads. `index` and `starts` are the list of
    active tokens: read if `rows` is BY_LIST, otherwise written. `active`: `[batch, time]`, read if `rows` is BY_FLAG.
    """
    batch, kv_heads, keys, width = k.shape
    time = len(index) // batch
    valid = starts if key_valid is None else key_valid.contiguous().view(torch.uint8)
    listed = rows == BY_LIST
    _attention[(triton.cdiv(time, ATTENTION["BLOCK_M"]), batch * heads)](
        q, q if query is None else query, k, v, valid, starts if columns is None else columns, out, index, starts,
        starts if active is None else active.view(torch.uint8), time, keys, 1.4426950408889634 * width**-0.5,
        *k.stride()[:3], *v.stride()[:3], HEADS=heads, SHARING=heads // kv_heads, WIDTH=width,
        BLOCK_W=max(16, triton.next_power_of_2(width)),
        BLOCK_D=min(64, triton.next_power_of_2(heads * width)), QUERY=query is not None, VALID=key_valid is not None,
        COLUMNS=columns is not None, ROWS=rows, BLOCK_T=16 if listed else max(16, triton.next_power_of_2(time)),
        PREFIX=16 if listed else min(PREFIX, triton.next_power_of_2(len(index))), **overlapped(out), **ATTENTION,
    )  # fmt: skip
