"""Whole sequences through a span at library speed: the tokens that take it are packed, on a GPU too.

How many take it only the device knows, so a pass is one CUDA graph with room for a guess, which is read off earlier
passes, and the number is asked when it has ended. Rows that are too many are computed and read by nobody; a pass that
had too little room is repeated with more.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokendepth.measure.clock import captured
from tokendepth.model import LanguageModel, Output
from tokendepth.ops.launch import LOW_PRECISION
from tokendepth.ops.varlen_attention import flash_takes

STEPS, TILE = 32, 128
"""The room grows by a 32nd of the tokens, in whole tiles of the library's products."""
REMEMBERED, GRAPHS = 8, 4
"""Passes that the guess is read off: it is the most that one of them needed. And graphs that are kept, a size each."""
CAN_BE_GIVEN = {"thresholds", "decisions"}


def packs_on_device(model: LanguageModel) -> bool:
    """Whether its passes can be packed without asking the device in their middle."""
    low = model.norm.weight.is_cuda and model.norm.weight.dtype in LOW_PRECISION
    return low and model.method.packs and flash_takes(model.config.width)


class PackedPass:
    """Sparse passes over sequences of one shape, without a cache or a gradient.

    `forward` is the model itself or what a compiler made of it; `given` goes to it with every call. What a call returns
    is overwritten by the next one.
    """

    def __init__(self, model: LanguageModel, ids: Tensor, forward: Callable[..., Output], **given: Tensor) -> None:
        assert model.method.packs
        assert not model.training
        assert packs_on_device(model) or not ids.is_cuda
        self._model, self._forward, self._ids = model, forward, ids.clone()
        self._given = {name: part.clone() for name, part in given.items()}
        self._step = TILE * math.ceil(ids.numel() / STEPS / TILE)
        self._needed: deque[int] = deque(maxlen=REMEMBERED)
        self._graphs: dict[int, Callable[[], object]] = {}

    def room_for(self, count: int) -> int:
        return self._step * max(1, math.ceil(count / self._step))

    @torch.no_grad()
    def __call__(self, ids: Tensor | None = None, **given: Tensor) -> Output:
        if ids is not None:
            self._ids.copy_(ids)
        for name, part in given.items():
            self._given[name].copy_(part)
        if not self._needed:
            first = self._model(self._ids, execution="sparse", **self._given)
            self._needed.append(self.room_for(_taking_the_span(first)))
        while True:
            room = max(self._needed)
            found = self._with(room)
            self._needed.append(self.room_for(_taking_the_span(found)))
            if self._needed[-1] <= room:
                return found

    def _with(self, room: int) -> Output:
        if room not in self._graphs:
            if len(self._graphs) == GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[room] = captured(lambda: self._run(room), self._ids.device)
        found = self._graphs[room]()
        assert isinstance(found, Output)
        return found

    def _run(self, room: int) -> Output:
        method = self._model.method
        method.room = room
        try:
            return self._forward(self._ids, execution="sparse", **self._given)
        finally:
            method.room = 0


class PackedPasses(nn.Module):
    """A compiled model whose sparse passes over whole sequences are packed; all others are as they were compiled.

    Such a pass brings a CUDA graph of its own for each shape, so it cannot be a part of another one.
    """

    def __init__(self, original: LanguageModel, compiled: Callable[..., Output]) -> None:
        super().__init__()
        self.original = original
        self._compiled = (compiled,)  # in a tuple, so that it is not registered as a submodule
        self._passes: dict[tuple, PackedPass] = {}

    def forward(self, ids: Tensor, *, execution: str = "soft", **given: Any) -> Output:
        given = {name: part for name, part in given.items() if part is not None}
        if execution != "sparse" or given.keys() - CAN_BE_GIVEN or torch.is_grad_enabled() or self.original.training:
            return self._compiled[0](ids, execution=execution, **given)
        kind = ids.shape, *((name, part.shape) for name, part in sorted(given.items()))
        if kind not in self._passes:
            self._passes[kind] = PackedPass(self.original, ids, self._compiled[0], **given)
        found = self._passes[kind](ids, **given)
        trace = replace(found.trace, work=found.trace.work.clone(), fewer_keys=found.trace.fewer_keys.clone())
        return Output(found.logits.clone(), trace, found.losses)  # the next pass overwrites what this one found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def by_itself(model: LanguageModel) -> LanguageModel:
    """The same compiled model with guesses of its own: for passes that are timed in turns and skip different shares."""
    return PackedPasses(model.original, model._compiled[0]) if isinstance(model, PackedPasses) else model  # pyright: ignore[reportReturnType]


def brings_graphs(model: LanguageModel) -> bool:
    """Whether its sparse passes are CUDA graphs already."""
    return isinstance(model, PackedPasses)


def _taking_the_span(found: Output) -> int:
    first = next(n for n, site in enumerate(found.trace.sites) if site.routed)
    return int(found.trace.work[first].sum())
