"""Whole sequences through a span at library speed: the tokens that take it are packed, on a GPU too.

How many take it only the device knows. One number is therefore asked of it in the middle of a pass, which is two CUDA
graphs: up to the decision, and from there on, with room for so many rows. Rows that are too many are computed and read
by nobody; sizes of the room are a step apart, so that few graphs serve all texts.
"""

import contextlib
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tokendepth.model import LanguageModel, Output
from tokendepth.ops.launch import LOW_PRECISION
from tokendepth.ops.varlen_attention import flash_takes

STEPS, TILE = 32, 128
"""The room grows by a 32nd of the tokens, in whole tiles of the library's products."""


@dataclass(frozen=True)
class _Graphs:
    until_decided: torch.cuda.CUDAGraph
    from_there: torch.cuda.CUDAGraph
    count: Tensor
    found: Output


class PackedPass:
    """Sparse passes over sequences of one shape, without a cache or a gradient.

    `forward` is the model itself or what a compiler made of it; `given` goes to it with every call. What a call returns
    is overwritten by the next one.
    """

    def __init__(self, model: LanguageModel, ids: Tensor, forward: Callable[..., Output], **given: Tensor) -> None:
        assert model.method.packs
        assert not model.training
        if ids.is_cuda:  # else attention would ask the device for more
            assert model.norm.weight.dtype in LOW_PRECISION
            assert flash_takes(model.config.width)
        self._method, self._forward, self._given, self._ids = model.method, forward, given, ids.clone()
        self._step = TILE * math.ceil(ids.numel() / STEPS / TILE)
        self._room = 0
        self._graphs: dict[int, _Graphs] = {}
        self._capturing: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._pool = torch.cuda.graph_pool_handle() if ids.is_cuda else None
        self._side = torch.cuda.Stream() if ids.is_cuda else None  # one for all: memory is kept by stream
        self._asked = cast(Callable[[Tensor], int], torch.compiler.disable(self._between))

    def room_for(self, count: int) -> int:
        return self._step * max(1, math.ceil(count / self._step))

    @torch.no_grad()
    def __call__(self, ids: Tensor | None = None) -> Output:
        if ids is not None:
            self._ids.copy_(ids)
        if not self._ids.is_cuda:
            return self._run()
        if not self._room:
            self._run()
        graphs = self._decided()
        wanted = self.room_for(int(graphs.count))
        if wanted != self._room:
            self._room = wanted
            graphs = self._decided()
        graphs.from_there.replay()
        return graphs.found

    def _run(self) -> Output:
        self._method.packing, self._method.room = True, self._asked
        try:
            return self._forward(self._ids, execution="sparse", **self._given)
        finally:
            self._method.packing, self._method.room = False, None

    def _between(self, count: Tensor) -> int:
        """Asked in the middle of a pass: how much room there is for `count` rows."""
        if not count.is_cuda or not self._room:
            self._room = self.room_for(int(count))
        if self._capturing is not None:
            first, second = self._capturing
            self._count = count
            first.capture_end()
            second.capture_begin(pool=self._pool)
            self._open = second
        return self._room

    def _decided(self) -> _Graphs:
        """The graphs with the present room, the first of them run."""
        if self._room not in self._graphs:
            self._graphs[self._room] = self._captured()
        graphs = self._graphs[self._room]
        graphs.until_decided.replay()
        return graphs

    def _captured(self) -> _Graphs:
        first, second = graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        side = self._side
        assert side is not None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles; lazy initialisations must not be captured
                self._run()
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            self._capturing, self._open = graphs, first
            try:
                first.capture_begin(pool=self._pool)
                found = self._run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # else every later call of this process would fail
                    self._open.capture_end()
                raise
            finally:
                self._capturing = None
            second.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return _Graphs(first, second, self._count, found)
