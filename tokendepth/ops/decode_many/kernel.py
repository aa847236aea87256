"""A block in a decoding step with several slots. Inactive slots read no keys and values.

Their rows in the products are computed but not used, so their inputs may be anything. Up to 16 slots the products are
custom kernels (`slot_products`); beyond that they are the library's, with three kernels between them that skip inactive
rows. While a kernel has little to do, spare programs prefetch the weights of the next product into the L2 cache.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.decode_attention.kernel import attend, is_active
from tokendepth.ops.decode_inputs import KeyWeights, Unwritten
from tokendepth.ops.few_rows.kernel import fetch, flags_of, lines_of
from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, overlapped
from tokendepth.ops.rows.kernel import ACTIVATIONS, _gelu, _gelu_tanh, _silu
from tokendepth.ops.slot_products.kernel import SLOTS, make_hidden, project, update
from tokendepth.ops.sparse_block import BlockWeights

ADD, ACTIVATE = {"num_warps": 4}, {"num_warps": 4}
UNITS = 1024
"""Hidden units of a token per program."""
PIECES = 2048
"""Pieces of 32 bytes, of weights, that a spare program fetches."""


@triton.jit
def _scaled(update, gate, slot, GATE: tl.constexpr):
    if GATE:
        update *= tl.load(gate + slot).to(tl.float32)
    return update


@triton.jit
def _add(
    h, update, out_bias, down_bias, gate, active, norm, norm_bias, eps, normed, up, batch,
    ALL: tl.constexpr, GATE: tl.constexpr, OUT_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr, RMS: tl.constexpr,
    D: tl.constexpr, UP: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first update of an active row, and the second norm; spare programs fetch `up`.

    The bias of the second update is added here, after the norm, because the library's product adds to every row.
    """
    slot = tl.program_id(0)
    if slot >= batch:
        fetch(up, (slot - batch) * ROWS, UP, ROWS, D, LINES)
    else:
        after_previous(OVERLAP)
        if is_active(active, slot, ALL):
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
    """Hidden units times the token's gate; 0 for inactive tokens. Programs beyond `tiles` fetch `down`."""
    PER_ROW: tl.constexpr = (FF + UNITS - 1) // UNITS
    tile = tl.program_id(0)
    if tile >= tiles:
        fetch(down, (tile - tiles) * ROWS, D, ROWS, FF, LINES)
    else:
        after_previous(OVERLAP)
        slot, unit = tile // PER_ROW, tile % PER_ROW * UNITS + tl.arange(0, UNITS)
        known = unit < FF
        value = tl.zeros([UNITS], tl.float32)
        if is_active(active, slot, ALL):
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
    """The number of programs that fetch a matrix, and the sizes of their shares; on a CPU there is nothing to fetch."""
    lines = lines_of(w.shape[1])
    rows = max(1, PIECES // lines)
    return triton.cdiv(len(w), rows) if w.is_cuda else 0, {"ROWS": rows, "LINES": rows * lines}


def add(h: Tensor, update: Tensor, active: Tensor | None, gate: Tensor | None, w: BlockWeights) -> Tensor:
    """Adds the update to the active rows of h `[slot, d]` and returns their second norm; other rows are not written."""
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
    """`[slot, d_ff]`, scaled by the gate; 0 for inactive rows."""
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
    cached = keys, values, seen, window
    with torch.cuda.device_of(h):
        if len(h) <= SLOTS:
            attended = attend(project(x.reshape(state.shape), joined), cached, columns, active, w, rotation, new)
            update(state, attended, w_out, out_bias, active, gate)
            update(state, make_hidden(state, active, w), down, down_bias, active, gate)
        else:
            qkv = torch.mm(x.reshape(state.shape), joined.t())
            attended = attend(qkv, cached, columns, active, w, rotation, new)
            normed = add(state, torch.mm(attended, w_out.t()), active, gate, w)
            hidden = activate(torch.mm(normed, up.t()), active, gate, w)
            state.addmm_(hidden, down.t())  # hidden is 0 in inactive rows, so they do not change


def kernel(h, x, layer, columns, active, weights: BlockWeights, gate, rotation, new: Unwritten) -> Tensor:
    """As the `reference` of `decode_block`, without host synchronisation."""
    check_kernel(h, layer.keys.shape[3])
    h = h.contiguous()
    given = [w.contiguous() if isinstance(w, Tensor) else w for w in weights[:-1]]
    heads, _, bias, norm, eps, joined = new.keys
    given += [heads, joined, bias, norm, eps, new.writes, new.among]
    _block(h, x, *layer, columns, active, gate, *(rotation or (None, None)), *given)
    return h
