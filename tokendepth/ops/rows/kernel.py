"""Matrix products over the active rows, whose number only the device knows.

The grid is large enough for all tokens; programs beyond the count return at once. `row` is an active token's index in
the list of active tokens, `place` its index in `batch x time`.
"""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokendepth.ops.launch import check_kernel
from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

NARROW = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
ACTIVATIONS = (None, "gelu", "swiglu", "geglu")
GROUP = 8  # row blocks that share weight tiles in the L2 cache


@triton.jit
def _gelu(x):
    """Computes the error function as a polynomial times an exponential, because the library's version has branches.

    Accurate to 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail *= 0.5 * tl.exp(-z * z)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu_tanh(x):
    """GELU's tanh form: x sigmoid(2 z)."""
    z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * z))


@triton.jit
def _linear(
    x, w, bias, residual, gate, out, index, count,
    K: tl.constexpr, OUT: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr, GATE: tl.constexpr, SCATTER: tl.constexpr, BULK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Row r of the active ones: residual + gate * f(x w^T + bias).

    ACTIVATION: f, as an index into `ACTIVATIONS`. From SWIGLU on it is gated: w has OUT rows for the input of f, and
    OUT more for its factor.
    GATHER: x is indexed by place, otherwise by row. RESIDUAL: 1 by row, 2 by place. SCATTER: out by place, otherwise by
    row. BULK: x and w are tensor descriptors, whose tiles the copy engine loads.
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
        GATED: tl.constexpr = ACTIVATION >= 2
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if GATED:
            factor = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            if BULK:
                x_tile = x.load([first_row, start])
                w_tile = w.load([first_column, start])
                if GATED:
                    up_tile = w.load([OUT + first_column, start])
            else:
                k = start + tl.arange(0, BLOCK_K)
                known = (k < K)[None, :]
                x_tile = tl.load(x + source[:, None] * K + k[None, :], mask=there[:, None] & known, other=0.0)
                w_at = column[:, None] * K + k[None, :]
                w_tile = tl.load(w + w_at, mask=wanted[:, None] & known, other=0.0)
                if GATED:
                    up_tile = tl.load(w + OUT * K + w_at, mask=wanted[:, None] & known, other=0.0)
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
            if GATED:
                factor = tl.dot(x_tile, tl.trans(up_tile), factor, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
            if GATED:
                factor += tl.load(bias + OUT + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == 1:
            acc = _gelu(acc)
        elif ACTIVATION == 2:
            acc = _silu(acc) * factor
        elif ACTIVATION == 3:
            acc = _gelu_tanh(acc) * factor
        if GATE:
            acc *= tl.load(gate + place, mask=there, other=0.0).to(tl.float32)[:, None]
        inside = there[:, None] & wanted[None, :]
        if RESIDUAL:
            source = place if RESIDUAL == 2 else row
            acc += tl.load(residual + source[:, None] * OUT + column[None, :], mask=inside, other=0.0).to(tl.float32)
        let_next_begin(OVERLAP)
        target = place if SCATTER else row
        tl.store(out + target[:, None] * OUT + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


def _has_copy_engine(x: Tensor) -> bool:
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)  # the interpreter emulates it


def launch_linear(x, w, out, index, count, config, *, bias=None, residual=None, by_place=False, gate=None, gather=False,
                  activation=None, scatter=False) -> None:  # fmt: skip
    """Rows of `x`, indexed by place (`gather`) or by row, times w; out by place (`scatter`) or by row."""
    features, k = out.shape[-1], w.shape[1]
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
    given = (x if tensor is None else tensor for tensor in (bias, residual, gate))
    _linear[grid](
        *operands, *given, out, index, count, K=k, OUT=features, GATHER=gather, BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS.index(activation),
        RESIDUAL=0 if residual is None else 2 if by_place else 1, GATE=gate is not None, SCATTER=scatter, BULK=bulk,
        GROUP=GROUP, **overlapped(out), **launch,
    )  # fmt: skip


@torch.library.custom_op("tokendepth::product_of_rows", mutates_args=())
def _product(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, starts: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_zeros(*x.shape[:2], len(weight))
    if out.numel():
        with torch.cuda.device_of(x):
            launch_linear(x, weight, out, index, starts[len(x) :], NARROW, bias=bias, gather=True, scatter=True)
    return out


@_product.register_fake
def _(x, weight, bias, index, starts):
    return x.new_empty(*x.shape[:2], len(weight))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, active: Tensor, listed=None) -> Tensor:
    """As `reference`, without host synchronisation."""
    from tokendepth.ops.decide.kernel import list_active

    check_kernel(x)
    return _product(x, weight, bias, *(list_active(active) if listed is None else listed))
