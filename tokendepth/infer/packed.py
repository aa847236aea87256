"""Whole sequences through a span at library speed: the tokens that take it are packed, on a GPU too.

How many take it only the device knows, so the pass is one CUDA graph with room for a guess, which is read off an
earlier pass, and the number is asked when it has ended. Rows that are too many are computed and read by nobody; a pass
that had too little room is repeated with more.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tokendepth.measure.clock import captured
from tokendepth.model import LanguageModel, Output
from tokendepth.ops.launch import LOW_PRECISION
from tokendepth.ops.varlen_attention import flash_takes

STEPS, TILE = 32, 128
"""The room grows by a 32nd of the tokens, in whole tiles of the library's products."""


class PackedPass:
    """Sparse passes over sequences of one shape, without a cache or a gradient.

    `forward` is the model itself or what a compiler made of it; `given` goes to it with every call. What a call returns
    is overwritten by the next one. The room never shrinks: too much costs a 32nd, too little a second pass.
    """

    def __init__(self, model: LanguageModel, ids: Tensor, forward: Callable[..., Output], **given: Tensor) -> None:
        assert model.method.packs
        assert not model.training
        if ids.is_cuda:  # else attention would ask the device in the middle of the pass
            assert model.norm.weight.dtype in LOW_PRECISION
            assert flash_takes(model.config.width)
        self._model, self._forward, self._given, self._ids = model, forward, given, ids.clone()
        self._step = TILE * math.ceil(ids.numel() / STEPS / TILE)
        self._room = 0
        self._replay: Callable[[], object] = self._run

    def room_for(self, count: int) -> int:
        return self._step * max(1, math.ceil(count / self._step))

    @torch.no_grad()
    def __call__(self, ids: Tensor | None = None) -> Output:
        if ids is not None:
            self._ids.copy_(ids)
        found = self._model(self._ids, execution="sparse", **self._given) if not self._room else self._replayed()
        while (wanted := self.room_for(_taking_the_span(found))) > self._room:
            self._room = wanted
            self._replay = captured(self._run, self._ids.device)
            found = self._replayed()
        return found

    def _replayed(self) -> Output:
        found = self._replay()
        assert isinstance(found, Output)
        return found

    def _run(self) -> Output:
        method = self._model.method
        method.room = self._room
        try:
            return self._forward(self._ids, execution="sparse", **self._given)
        finally:
            method.room = 0


def _taking_the_span(found: Output) -> int:
    first = next(n for n, site in enumerate(found.trace.sites) if site.routed)
    return int(found.trace.work[first].sum())
