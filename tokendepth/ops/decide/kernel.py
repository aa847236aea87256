"""One kernel. Every program itself counts the active tokens before its sequence, so that none waits for another."""

# Triton launches take constexpr numbers and extra options, which a type checker cannot know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokendepth.ops.launch.kernel import after_previous, let_next_begin, overlapped

PREFIX = 8192  # tokens that are counted at once
BLOCK = 1024  # tokens that are listed at once
# How tokens are chosen: by flags, or by a threshold (a number, a tensor with one number, or one number per token).
BY_FLAG, BY_NUMBER, BY_ONE, BY_TOKEN = range(4)


@triton.jit
def above(logit, threshold, number, place, there, BY: tl.constexpr, INCLUSIVE: tl.constexpr):
    """Whether the scores, -logit, of the tokens at `place` exceed their thresholds."""
    limit = number
    if BY == 2:
        limit = tl.load(threshold)
    if BY == 3:
        limit = tl.load(threshold + place, mask=there, other=0.0)
    return -logit >= limit if INCLUSIVE else -logit > limit


@triton.jit
def active_among(
    given, threshold, number, valid, place, end, BY: tl.constexpr, INCLUSIVE: tl.constexpr, VALID: tl.constexpr
):
    """1 for the tokens at `place` that are active and before `end`, otherwise 0."""
    there = place < end
    if BY == 0:
        active = tl.load(given + place, mask=there, other=0) != 0
    else:
        logit = tl.load(given + place, mask=there, other=0.0)
        active = above(logit, threshold, number, place, there, BY, INCLUSIVE) & there
    if VALID:
        active = active & (tl.load(valid + place, mask=there, other=0) != 0)
    return active.to(tl.int32)


@triton.jit
def _list(
    given, threshold, number, valid, active, index, starts, batch, time,
    BY: tl.constexpr, INCLUSIVE: tl.constexpr, VALID: tl.constexpr, PREFIX: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program b: the active tokens of sequence b, written to their part of `index`, which begins at `starts[b]`."""
    after_previous(OVERLAP)
    b = tl.program_id(0)
    before = 0
    for start in range(0, b * time, PREFIX):
        place = start + tl.arange(0, PREFIX)
        before += tl.sum(active_among(given, threshold, number, valid, place, b * time, BY, INCLUSIVE, VALID), 0)
    tl.store(starts + b, before)
    for start in range(0, time, BLOCK):
        place = b * time + start + tl.arange(0, BLOCK)
        end = b * time + time
        flags = active_among(given, threshold, number, valid, place, end, BY, INCLUSIVE, VALID)
        if BY != 0:
            tl.store(active + place, flags.to(tl.uint8), mask=place < end)
        tl.store(index + before + tl.cumsum(flags, 0) - flags, place, mask=flags != 0)
        before += tl.sum(flags, 0)
    let_next_begin(OVERLAP)
    if b == batch - 1:
        tl.store(starts + batch, before)


def _launch(given, threshold, number, valid, active, index, starts, by, inclusive) -> None:
    batch, time = given.shape
    if not given.numel():
        starts.zero_()
        return
    with torch.cuda.device_of(given):
        _list[(batch,)](
            given, given if threshold is None else threshold, number, given if valid is None else valid, active, index,
            starts, batch, time, BY=by, INCLUSIVE=inclusive, VALID=valid is not None,
            PREFIX=min(PREFIX, triton.next_power_of_2(given.numel())), BLOCK=min(BLOCK, triton.next_power_of_2(time)),
            num_warps=8, **overlapped(given[..., None]),
        )  # fmt: skip


def by_what(threshold: Tensor | None, logit: Tensor) -> tuple[Tensor | None, int]:
    """The threshold tensor for the kernel (None for a number), and its kind."""
    if threshold is None:
        return None, BY_NUMBER
    assert threshold.numel() in (1, logit.numel()), "one threshold, or one a token"
    return threshold.contiguous(), BY_ONE if threshold.numel() == 1 else BY_TOKEN


def empty_list(given: Tensor) -> tuple[Tensor, Tensor]:
    return given.new_empty(given.numel(), dtype=torch.int32), given.new_empty(len(given) + 1, dtype=torch.int32)


@torch.library.custom_op("tokendepth::decide", mutates_args=())
def _decide(
    logit: Tensor, threshold: Tensor | None, number: float, valid: Tensor | None, inclusive: bool
) -> tuple[Tensor, Tensor, Tensor]:
    logit = logit.contiguous()
    threshold, by = by_what(threshold, logit)
    active = torch.empty_like(logit, dtype=torch.bool)
    index, starts = empty_list(logit)
    valid = None if valid is None else valid.contiguous().view(torch.uint8)
    _launch(logit, threshold, number, valid, active.view(torch.uint8), index, starts, by, inclusive)
    return active, index, starts


@_decide.register_fake
def _(logit, threshold, number, valid, inclusive):
    return torch.empty_like(logit, dtype=torch.bool, memory_format=torch.contiguous_format), *empty_list(logit)


@torch.library.custom_op("tokendepth::list_active", mutates_args=())
def list_active(active: Tensor) -> tuple[Tensor, Tensor]:
    """`index` and `starts` of `Listed`, for flags `[batch, time]`."""
    flags = active.contiguous().view(torch.uint8)
    index, starts = empty_list(flags)
    _launch(flags, None, 0.0, None, flags, index, starts, BY_FLAG, False)
    return index, starts


@list_active.register_fake
def _(active):
    return empty_list(active)


def kernel(
    logit: Tensor, threshold: Tensor | float, valid: Tensor | None, inclusive: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As `reference`, without host synchronisation; the list is not written beyond the last active token."""
    active, index, starts = _decide(logit, *tensor_or_number(threshold), valid, inclusive)
    return active, (index, starts)


def tensor_or_number(threshold: Tensor | float) -> tuple[Tensor | None, float]:
    """A threshold as two arguments for a registered op: a tensor or None, and a number."""
    return (threshold, 0.0) if isinstance(threshold, Tensor) else (None, float(threshold))
