"""One kernel. Its first programs run the router, the others compute keys and values; each normalises its own rows.

The last of the router's programs to finish sums up their results and decides. For many slots, a later product computes
keys and values, and the other programs only fetch its weights.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.block_inputs import BlockInputs
from tokendepth.ops.decide import Decision
from tokendepth.ops.decide.kernel import BY_NUMBER, above, by_what, tensor_or_number
from tokendepth.ops.decode_inputs import KeyWeights, Unwritten
from tokendepth.ops.few_rows.kernel import (
    count,
    counters,
    fetch,
    flags_of,
    launch,
    lines_of,
    normalised,
    numbers,
    product,
    programs_at_once,
    rows,
    statistics,
    statistics_in_pieces,
)
from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

PAIRS, UNITS = 8, 16
"""Per program: pairs of a key's elements, for a single token, and hidden units of the router."""
LARGEST_TILE = 2**15
"""Weights that a program holds at once."""
PIECES = 4096
"""Pieces of 32 bytes, of the next product's weights, that a program fetches."""


@triton.jit
def _write_norm(
    h, at, there, eps, norm, norm_bias, x,
    RMS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    if D <= BLOCK_D:
        k = tl.arange(0, BLOCK_D)
        value = numbers(h, at, there, k, D)
        mean, square = statistics(value, (k < D)[None, :], RMS, D)
        value = normalised(value, k, mean, square, eps, norm, norm_bias, True, not RMS, D)
        inside = there[:, None] & (k < D)[None, :]
        tl.store(x + at[:, None] + k[None, :], value.to(x.dtype.element_ty), inside)
    else:
        mean, square = statistics_in_pieces(h, at, there, RMS, D, BLOCK_M, BLOCK_D)
        for start in range(0, D, BLOCK_D):
            k = start + tl.arange(0, BLOCK_D)
            value = numbers(h, at, there, k, D)
            value = normalised(value, k, mean, square, eps, norm, norm_bias, True, not RMS, D)
            inside = there[:, None] & (k < D)[None, :]
            tl.store(x + at[:, None] + k[None, :], value.to(x.dtype.element_ty), inside)


@triton.jit
def _enter(
    h, norm, norm_bias, eps, w, b, head_norm, head_eps, keys, values, seen, writes, leaving, given, cos, sin, turns,
    w1, b1, w2, b2, threshold, number, valid, partial, arrived, x, logit, keep, active, batch,
    slot_stride, head_stride, column_stride, seen_stride,
    MAKES: tl.constexpr, NEXT: tl.constexpr, ROWS: tl.constexpr,
    RMS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr, ROTATE: tl.constexpr, LEAVING: tl.constexpr, ALL: tl.constexpr, UNITS: tl.constexpr,
    NORMED: tl.constexpr, BY: tl.constexpr, INCLUSIVE: tl.constexpr, VALID: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_U: tl.constexpr,
    BLOCK_R: tl.constexpr, LINES: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (tile, m) handles the m-th block of rows. The first tiles compute BLOCK_U of the router's UNITS hidden
    units each, the others pairs of a key or a value. Without MAKES, each of the others fetches ROWS of the NEXT rows of
    `w` instead. The first of them also writes the norm.

    A pair is what rotary positions rotate: elements i and i + HALF of a head. turns: stride of cosines and sines from
    one slot to the next, 0 if all slots share them.
    """
    ROUTING: tl.constexpr = (UNITS + BLOCK_U - 1) // BLOCK_U
    PARTS: tl.constexpr = (HALF + BLOCK_P - 1) // BLOCK_P
    WIDTH: tl.constexpr = 2 * HALF
    tile = tl.program_id(0) - ROUTING
    if FETCH and ALL:  # needed regardless of the previous kernel's result
        if tile < 0:
            fetch(w1, tl.program_id(0) * BLOCK_U, UNITS, BLOCK_U, D, BLOCK_U * LINES)
        elif MAKES:
            begin = tile // PARTS * WIDTH + tile % PARTS * BLOCK_P
            fetch(w, begin, 2 * HEADS * WIDTH, BLOCK_P, D, BLOCK_P * LINES)
            fetch(w, begin + HALF, 2 * HEADS * WIDTH, BLOCK_P, D, BLOCK_P * LINES)
    if FETCH and not MAKES:  # noqa: SIM102 - constexpr: compiled only if true
        if (tile >= 0) & (tl.program_id(1) == 0):
            fetch(w, tile * ROWS, NEXT, ROWS, D, ROWS * LINES)
    after_previous(OVERLAP)
    first = tl.program_id(1) * BLOCK_M
    busy = first < count(given, batch, ALL, BLOCK_B)
    if not MAKES:
        busy = busy & (tile <= 0)
    if busy:
        place, there, _ = rows(given, first, batch, ALL, BLOCK_B, BLOCK_M)
        at = place * D
        if tile < 0:
            unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
            known = unit < UNITS
            found = product(
                h, at, there, eps, h, h, w1, unit, known,
                NORMED, False, RMS, D, BLOCK_M, BLOCK_U, BLOCK_D if NORMED else BLOCK_K,
            )  # fmt: skip
            found += tl.load(b1 + unit, known, 0.0).to(tl.float32)[None, :]
            found = tl.where(found < 0, 0.0, found)  # tl.maximum would hide a NaN
            found *= tl.load(w2 + unit, known, 0.0).to(tl.float32)[None, :]
            tl.store(partial + tl.program_id(0) * batch + place, tl.sum(found, 1), there)
        else:
            if MAKES:
                head, pair = tile // PARTS, tile % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
                both = tl.arange(0, 2 * BLOCK_P)
                in_head = tile % PARTS * BLOCK_P + both % BLOCK_P
                column = head * WIDTH + in_head + both // BLOCK_P * HALF
                pairs = product(
                    h, at, there, eps, norm, norm_bias, w, column, in_head < HALF,
                    True, True, RMS, D, BLOCK_M, 2 * BLOCK_P, BLOCK_D,
                )  # fmt: skip
                if BIAS:
                    pairs += tl.load(b + column, in_head < HALF, 0.0).to(tl.float32)[None, :]
                one, other = tl.split(tl.permute(tl.reshape(pairs, [BLOCK_M, 2, BLOCK_P]), [0, 2, 1]))
                shown = pair < HALF
                into = values
                if head < HEADS:
                    into = keys
                    if HEAD_NORM:  # the program has the whole head
                        scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(other * other, 1)) / WIDTH + head_eps)[:, None]
                        one *= scale * tl.load(head_norm + pair, shown, 0.0).to(tl.float32)[None, :]
                        other *= scale * tl.load(head_norm + HALF + pair, shown, 0.0).to(tl.float32)[None, :]
                    if ROTATE:
                        turn = (place * turns)[:, None] + pair[None, :]
                        c = tl.load(cos + turn, shown[None, :], 0.0).to(tl.float32)
                        s = tl.load(sin + turn, shown[None, :], 0.0).to(tl.float32)
                        one, other = one * c - other * s, other * c + one * s
                to = (
                    place * slot_stride + head % HEADS * head_stride + tl.load(writes + place, there, 0) * column_stride
                )
                inside = there[:, None] & shown[None, :]
                tl.store(into + to[:, None] + pair[None, :], one.to(keys.dtype.element_ty), inside)
                tl.store(into + to[:, None] + pair[None, :] + HALF, other.to(keys.dtype.element_ty), inside)
            if tile == 0:
                _write_norm(h, at, there, eps, norm, norm_bias, x, RMS, D, BLOCK_M, BLOCK_D)
    let_next_begin(OVERLAP)
    slot = tl.arange(0, BLOCK_B)
    here = slot < batch
    if (tile == 0) & (first == 0):
        others = tl.full([BLOCK_B], 1, tl.int32)
        if LEAVING:
            others = (tl.load(leaving + slot, here, 0) != 0).to(tl.int32)
        flag_at = slot.to(tl.int64) * seen_stride + tl.load(writes + slot, here, 0)
        tl.store(seen + flag_at, others.to(tl.uint8), here)
    if ROUTING > 0:  # noqa: SIM102 - constexpr: compiled only if true
        if tile < 0:
            tl.debug_barrier()  # all threads store before the counter is incremented
            if tl.atomic_add(arrived, 1, sem="acq_rel") == ROUTING * tl.num_programs(1) - 1:
                tl.store(arrived, 0)  # reset for the next kernel
                program = tl.arange(0, BLOCK_R)
                made = (program < ROUTING)[:, None] & here[None, :]
                parts = tl.load(partial + program[:, None] * batch + slot[None, :], made, 0.0, cache_modifier=".cg")
                said = tl.sum(parts, 0) + tl.load(b2).to(tl.float32)
                tl.store(logit + slot, said, here)
                tl.store(keep + slot, 1.0 / (1.0 + tl.exp(said)), here)
                chosen = above(said, threshold, number, slot, here, BY, INCLUSIVE)
                if VALID:
                    chosen = chosen & (tl.load(valid + slot, here, 0) != 0)
                tl.store(active + slot, chosen.to(tl.uint8), here)


@torch.library.custom_op("tokendepth::decode_inputs", mutates_args=("keys", "values", "seen"))
def _inputs(
    h: Tensor, norm: Tensor, norm_bias: Tensor | None, eps: float, heads: int, w: Tensor, b: Tensor | None,
    head_norm: Tensor | None, head_eps: float, keys: Tensor, values: Tensor, seen: Tensor, writes: Tensor,
    cos: Tensor | None, sin: Tensor | None, leaving: Tensor | None, given: Tensor | None, router: list[Tensor],
    normed: bool, threshold: Tensor | None, number: float, valid: Tensor | None, inclusive: bool, makes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, _, d = h.shape
    h, w, router = h.contiguous(), w.contiguous(), [part.contiguous() for part in router]
    x, logit, keep, active = made = _empty(h, bool(router))
    if not batch:
        return made
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1, "a head's width must be contiguous"
    threshold, by = by_what(threshold, logit) if router else (None, BY_NUMBER)
    sizes, half, units = launch(h), keys.shape[3] // 2, len(router[0]) if router else 0
    pairs, whole = PAIRS if batch == 1 else 16, triton.next_power_of_2(half)
    pairs = max(pairs, whole) if head_norm is not None else pairs if batch > 1 else min(pairs, whole)
    sizes["BLOCK_D"] = min(sizes["BLOCK_D"], max(16, LARGEST_TILE // (2 * pairs)))
    routing, lines = triton.cdiv(units, UNITS), lines_of(d)
    ahead = max(1, PIECES // lines)
    partial = h.new_empty(max(1, routing), batch, dtype=torch.float32)
    others = 2 * heads * triton.cdiv(half, pairs) if makes else triton.cdiv(len(w), ahead) if h.is_cuda else 1
    grid = (routing + others, triton.cdiv(batch, sizes["BLOCK_M"]))
    _, arrived = counters(h.device, programs_at_once(h.device))
    flags = seen.view(torch.uint8)
    rotation = (h, h) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    with torch.cuda.device_of(h):
        _enter[grid](
            h, norm, norm if norm_bias is None else norm_bias, eps, w, w if b is None else b,
            w if head_norm is None else head_norm, head_eps, keys, values, flags, writes.contiguous(),
            flags_of(leaving, flags), flags_of(given, flags), *rotation,
            half if cos is not None and len(cos) > 1 else 0, *(router or [h] * 4),
            h if threshold is None else threshold, number, flags_of(valid, flags), partial, arrived, x, logit, keep,
            active.view(torch.uint8), batch, *keys.stride()[:3], seen.stride(0), MAKES=makes,
            NEXT=len(w), ROWS=ahead, RMS=norm_bias is None, D=d,
            HEADS=heads, HALF=half, BIAS=b is not None, HEAD_NORM=head_norm is not None, ROTATE=cos is not None,
            LEAVING=leaving is not None, ALL=given is None, UNITS=units, NORMED=normed, BY=by, INCLUSIVE=inclusive,
            VALID=valid is not None, BLOCK_B=triton.next_power_of_2(batch), BLOCK_P=pairs, BLOCK_U=UNITS,
            BLOCK_R=triton.next_power_of_2(max(1, routing)), LINES=lines, FETCH=h.is_cuda, **overlapped(h),
            **sizes,
        )  # fmt: skip
    return made


def _empty(h: Tensor, asked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = h.shape[:-1] if asked else (0,)
    logit, keep = (h.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    x = torch.empty_like(h, memory_format=torch.contiguous_format)
    return x, logit, keep, h.new_empty(tokens, dtype=torch.bool)


@_inputs.register_fake
def _(h, norm, norm_bias, eps, heads, w, b, head_norm, head_eps, keys, values, seen, writes, cos, sin, leaving, given,
      router, *_):  # fmt: skip
    return _empty(h, bool(router))


def without_keys(h, norm, keys, layer, writes, rotation, leaving, active, router, threshold) -> BlockInputs:
    """As `kernel`, but only the flags of keys are written to the cache; keys and values remain `unwritten`."""
    weights, rest = KeyWeights(keys.heads, keys.joined), (leaving, active, router, threshold)
    made = kernel(h, norm, weights, layer, writes, None, *rest, makes=False)
    return made._replace(unwritten=Unwritten(keys, writes, active))


def kernel(
    h, norm, keys, layer, writes, rotation, leaving, active, router, threshold, *, makes: bool = True
) -> BlockInputs:
    """As `reference`; inactive rows of x are not written."""
    check_kernel(h, layer.keys.shape[3])
    cos, sin = rotation or (None, None)
    limit = (None, 0.0) if threshold is None else tensor_or_number(threshold.value)
    valid, inclusive = (None, False) if threshold is None else threshold[1:]
    x, logit, keep, chosen = _inputs(
        h, *norm, *keys[:5], *layer[:3], writes, cos, sin, leaving, active, list(router[:4]) if router else [],
        router is not None and router.normed, *limit, valid, inclusive, makes,
    )  # fmt: skip
    return BlockInputs(x, None, Decision(chosen, logit, keep) if router else None)
