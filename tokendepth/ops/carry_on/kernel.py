"""One pass over memory forward and one backward, where `eager` takes log2(time) passes of several calls each.

Each program handles some columns of one sequence and goes through its tokens tile by tile, with a scan in each tile.
"""

# Triton launches take constexpr numbers, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# 64 sequences of width 256 make 512 programs; a tile is 16 elements per thread.
BLOCK_T, BLOCK_D, WARPS = 64, 32, 4


@triton.jit
def _joined(keep, carried, later_keep, later_carried):
    """Combines two neighbouring stretches: the factor for what comes before them, and what they carry themselves."""
    return keep * later_keep, carried * later_keep + later_carried


@triton.jit
def _forward(
    fresh, keep, before, out, time, d,
    BEFORE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_T)
    fresh += sequence * time * d
    out += sequence * time * d
    carried = tl.zeros([BLOCK_D], tl.float32)
    if BEFORE:
        carried += tl.load(before + sequence * d + column, mask=column < d, other=0.0).to(tl.float32)
    for start in range(0, time, BLOCK_T):
        t = start + row
        inside = (t < time)[:, None] & (column < d)[None, :]
        at = t[:, None] * d + column[None, :]
        new = tl.load(fresh + at, mask=inside, other=0.0).to(tl.float32)
        kept = tl.load(keep + sequence * time + t, mask=t < time, other=0.0)
        kept, new = tl.associative_scan((kept[:, None] + tl.zeros_like(new), new), 0, _joined)
        found = new + kept * carried[None, :]
        tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)
        carried = tl.sum(tl.where((row == BLOCK_T - 1)[:, None], found, 0.0), 0)


@triton.jit
def _backward(
    grad, keep, out, before, grad_fresh, grad_keep, time, d,
    BEFORE: tl.constexpr, OF_KEEP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient for fresh is g_t = grad_t + keep_{t+1} g_{t+1}, from the end; that for keep is `g_t . c_{t-1}`."""
    sequence, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_T)
    grad += sequence * time * d
    out += sequence * time * d
    grad_fresh += sequence * time * d
    grad_keep += (sequence * tl.num_programs(1) + piece) * time
    carried = tl.zeros([BLOCK_D], tl.float32)
    tiles = tl.cdiv(time, BLOCK_T)
    for tile in range(tiles):
        t = (tiles - 1 - tile) * BLOCK_T + row
        inside = (t < time)[:, None] & (column < d)[None, :]
        at = t[:, None] * d + column[None, :]
        new = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        kept = tl.load(keep + sequence * time + t + 1, mask=t + 1 < time, other=0.0)
        kept, new = tl.associative_scan((kept[:, None] + tl.zeros_like(new), new), 0, _joined, reverse=True)
        found = new + kept * carried[None, :]
        tl.store(grad_fresh + at, found.to(grad_fresh.dtype.element_ty), mask=inside)
        if OF_KEEP:
            earlier = tl.load(out + at - d, mask=inside & (t > 0)[:, None], other=0.0).to(tl.float32)
            if BEFORE:
                first = tl.load(before + sequence * d + column, mask=column < d, other=0.0).to(tl.float32)
                earlier += tl.where((t == 0)[:, None], first[None, :], 0.0)
            tl.store(grad_keep + t, tl.sum(found * earlier, 1), mask=t < time)
        carried = tl.sum(tl.where((row == 0)[:, None], found, 0.0), 0)


_INTERPRETED = not isinstance(_forward, triton.JITFunction)  # TRITON_INTERPRET=1 when this module was imported


def _grid(x: Tensor) -> tuple[int, int]:
    return len(x), triton.cdiv(x.shape[2], BLOCK_D)


def _sizes(x: Tensor) -> dict[str, int]:
    return {"BLOCK_T": min(BLOCK_T, max(2, triton.next_power_of_2(x.shape[1]))), "BLOCK_D": BLOCK_D, "num_warps": WARPS}


@torch.library.custom_op("tokendepth::carry_on", mutates_args=())
def _carry_on(fresh: Tensor, keep: Tensor, before: Tensor | None) -> Tensor:
    fresh, out = fresh.contiguous(), torch.empty_like(fresh, memory_format=torch.contiguous_format)
    if out.numel():
        start = fresh if before is None else before.contiguous()
        with torch.cuda.device_of(fresh):
            _forward[_grid(fresh)](
                fresh, keep.contiguous(), start, out, *fresh.shape[1:], BEFORE=before is not None, **_sizes(fresh)
            )
    return out


@_carry_on.register_fake
def _(fresh, keep, before):
    return torch.empty_like(fresh, memory_format=torch.contiguous_format)


@torch.library.custom_op("tokendepth::carry_on_backward", mutates_args=())
def _gradients(grad: Tensor, keep: Tensor, out: Tensor, before: Tensor | None, of_keep: bool) -> tuple[Tensor, Tensor]:
    """The gradients for fresh, and for keep per piece of d: `[batch, pieces, time]`."""
    grad = grad.contiguous()
    grad_fresh, grad_keep = _empty_gradients(grad, of_keep)
    if grad.numel():
        start = out if before is None else before.contiguous()
        choices = {"BEFORE": before is not None, "OF_KEEP": of_keep}
        with torch.cuda.device_of(grad):
            given = grad, keep.contiguous(), out.contiguous(), start, grad_fresh, grad_keep
            _backward[_grid(grad)](*given, *grad.shape[1:], **choices, **_sizes(grad))
    return grad_fresh, grad_keep


def _empty_gradients(grad: Tensor, of_keep: bool) -> tuple[Tensor, Tensor]:
    pieces = triton.cdiv(grad.shape[2], BLOCK_D) if of_keep else 0
    of_fresh = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return of_fresh, grad.new_empty(len(grad), pieces, grad.shape[1], dtype=torch.float32)


@_gradients.register_fake
def _(grad, keep, out, before, of_keep):
    return _empty_gradients(grad, of_keep)


def _save(ctx, inputs, output) -> None:
    _, keep, before = inputs
    ctx.save_for_backward(keep, output, before)


def _autograd(ctx, grad: Tensor):
    of_keep = ctx.needs_input_grad[1]
    grad_fresh, grad_keep = _gradients(grad, *ctx.saved_tensors, of_keep)
    return grad_fresh, grad_keep.sum(1) if of_keep else None, None


_carry_on.register_autograd(_autograd, setup_context=_save)


def kernel(fresh: Tensor, keep: Tensor, before: Tensor | None = None) -> Tensor:
    """As `reference`, summed in float32, bitwise reproducible; without a gradient for `before`."""
    if not (fresh.is_cuda or _INTERPRETED):
        raise ValueError(f"backend 'kernel' needs a GPU, or TRITON_INTERPRET=1, not a tensor on {fresh.device}")
    return _carry_on(fresh, keep.float(), before)
