"""Forward passes over whole sequences in which the tokens that take a span are packed into dense matrices.

On a GPU only the device knows how many tokens take the span. A pass is therefore two CUDA graphs: one up to the
decisions, and one for the rest with room for a certain number of rows. The device copies the token count to the host,
which selects the second graph. If decisions depend only on the text, the count is there early and the second graph is
launched while the first one runs; otherwise the device idles for some microseconds. Room is rounded up to a few sizes,
so that few graphs serve all texts; the surplus rows are computed and ignored.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokendepth.infer.wrapped import Wrapped
from tokendepth.measure.clock import captured
from tokendepth.model import LanguageModel, Output
from tokendepth.ops.launch import LOW_PRECISION, has_triton
from tokendepth.ops.varlen_attention import flash_takes

STEPS, TILE = 32, 128
"""Room is a multiple of a 32nd of all tokens, rounded up to whole tiles of cuBLAS."""
GRAPHS, SHAPES = 8, 8
"""Graphs kept per input shape (one for each size of room), and shapes kept: every graph takes memory."""
CAN_BE_GIVEN = {"thresholds", "decisions"}
UntilDecided = Callable[..., tuple[Tensor, Tensor, Tensor | None]]
"""As `LanguageModel.until_decided`, unbound, so that a copy of a model passes itself."""


def packs_on_device(model: LanguageModel) -> bool:
    """Whether packed passes work for this model on the GPU that holds its weights."""
    weight = model.norm.weight
    if not weight.is_cuda or torch.version.hip is not None or not has_triton():
        return False
    flash = torch.cuda.get_device_capability(weight.device) >= (8, 0) and flash_takes(model.config.width)
    return flash and model.method.packs and weight.dtype in LOW_PRECISION


class PackedPass:
    """Sparse forward passes over inputs of one shape, without a cache or gradients.

    `until_decided` and `forward` are the model's own or compiled versions; both get `given` with every call. Each call
    overwrites the result of the previous one.
    """

    def __init__(
        self,
        model: LanguageModel,
        ids: Tensor,
        until_decided: UntilDecided = LanguageModel.until_decided,
        forward: Callable[..., Output] | None = None,
        **given: Tensor,
    ) -> None:
        assert model.method.packs
        assert not model.training
        assert packs_on_device(model) or not ids.is_cuda
        self._model, self._until_decided = model, until_decided
        self._forward = model if forward is None else forward
        with torch.inference_mode(False):  # inference tensors could not be written to by later passes
            self._ids, self._given = ids.clone(), {name: part.clone() for name, part in given.items()}
            # Tokens that take the span; -1 until the device has written the number.
            self._host_count = torch.zeros((), dtype=torch.long, pin_memory=ids.is_cuda)
        self._step = TILE * math.ceil(ids.numel() / STEPS / TILE)
        self._beside = torch.cuda.Stream(ids.device) if ids.is_cuda and model.method.decides_by_text else None
        # Second graphs share memory, since only the latest result is read; `_scored` keeps their inputs alive.
        self._pool = torch.cuda.graph_pool_handle() if ids.is_cuda else None
        self._first: Callable[[], object] | None = None
        self._scored: tuple[Tensor, Tensor] | None = None
        self._graphs: dict[int, Callable[[], object]] = {}
        self._found: dict[int, Output] = {}

    def room_for(self, count: int) -> int:
        return self._step * max(1, math.ceil(count / self._step))

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, ids: Tensor | None = None, **given: Tensor) -> Output:
        with torch.cuda.device_of(self._ids):  # capture uses the current device
            if ids is not None:
                self._ids.copy_(ids)
            for name, part in given.items():
                self._given[name].copy_(part)
            self._begin()
            return self._end(self.room_for(self._count()))

    def forget(self) -> None:
        """Free the memory of the graphs, after waiting for those still running."""
        if self._ids.is_cuda:
            torch.cuda.synchronize(self._ids.device)
            self._pool = torch.cuda.graph_pool_handle()
        self._first = self._scored = None
        self._graphs.clear()
        self._found.clear()

    def _begin(self) -> None:
        if self._first is None:
            this = weakref.proxy(self)  # else the captured function would keep this object alive
            self._first = captured(lambda: this._decide(), self._ids.device, pool=self._pool)
        if self._host_count < 0:  # an interrupted pass may still write its count
            torch.cuda.synchronize(self._ids.device)
        self._host_count.fill_(-1)
        self._first()

    def _decide(self) -> None:
        """On a GPU, decisions by text run in a parallel branch of the graph, so they and the blocks need not wait."""
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        if self._model.method.decides_by_text:
            with torch.cuda.stream(self._beside):
                self._host_count.copy_(self._model.active_count_by_text(self._ids, **self._given), non_blocking=True)
        state, score, count = self._until_decided(self._model, self._ids, **self._given)
        self._scored = state, score
        if count is not None:
            self._host_count.copy_(count, non_blocking=True)
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def _count(self) -> int:
        """Wait for the token count, which is there at the latest when the first graph has ended."""
        while self._host_count < 0 and not torch.cuda.current_stream(self._ids.device).query():
            pass
        assert self._host_count >= 0
        return int(self._host_count)

    def _end(self, room: int) -> Output:
        graph = self._graphs.pop(room, None)
        if graph is None:
            if len(self._graphs) == GRAPHS:
                oldest = next(iter(self._graphs))
                del self._graphs[oldest], self._found[oldest]
            this = weakref.proxy(self)
            graph = captured(lambda: this._rest(room), self._ids.device, pool=self._pool)
        self._graphs[room] = graph  # most recently used last
        graph()
        return self._found[room]

    def _rest(self, room: int) -> None:
        how = {"execution": "sparse", "room": room, "scored": self._scored}
        self._found[room] = self._forward(self._ids, **how, **self._given)


class PackedPasses(Wrapped):
    """A compiled model whose sparse passes over whole sequences are packed; other passes use the compiled model.

    A packed pass consists of CUDA graphs, so it cannot be captured in another one.
    """

    def __init__(
        self,
        original: LanguageModel,
        compiled: Callable[..., Output],
        until_decided: UntilDecided = LanguageModel.until_decided,
    ) -> None:
        super().__init__(original)
        self._compiled = (compiled,)  # in a tuple, so that it is not registered as a submodule
        self._until_decided = until_decided
        self._passes: dict[tuple, PackedPass] = {}
        self._stream: torch.cuda.Stream | None = None
        self._forget()

    @property
    def unpacked(self) -> Callable[..., Output]:
        return self._compiled[0]

    def forward(self, ids: Tensor, *, execution: str = "soft", **given: Any) -> Output:
        given = {name: part for name, part in given.items() if part is not None}
        if execution != "sparse" or given.keys() - CAN_BE_GIVEN or torch.is_grad_enabled() or self.original.training:
            return self.unpacked(ids, execution=execution, **given)
        if self._weights != self._places():
            self._forget()
        if not self._packs:  # the weights have since moved to another device or changed type
            return self.unpacked(ids, execution=execution, **given)
        if ids.is_cuda and self._stream != (stream := torch.cuda.current_stream(ids.device)):
            torch.cuda.synchronize(ids.device)  # a pass on another stream may still run, and shares memory
            self._stream = stream
        found = self._pass(ids, given)(ids, **given)
        trace = replace(found.trace, work=found.trace.work.clone(), fewer_keys=found.trace.fewer_keys.clone())
        return Output(found.logits.clone(), trace, found.losses)  # the next pass overwrites what this one found

    def _pass(self, ids: Tensor, given: dict[str, Tensor]) -> PackedPass:
        parts = sorted({"ids": ids, **given}.items())
        kind = tuple((name, part.shape, part.dtype, part.device) for name, part in parts)
        found = self._passes.pop(kind, None)
        if found is None:
            if len(self._passes) == SHAPES:
                self._passes.pop(next(iter(self._passes))).forget()
            found = PackedPass(self.original, ids, self._until_decided, self.unpacked, **given)
        self._passes[kind] = found  # most recently used last
        return found

    def _places(self) -> tuple[int, int]:
        """Addresses of weights, which change if the model is moved: graphs read the addresses at capture."""
        return self.original.norm.weight.data_ptr(), self.original.embedding.weight.data_ptr()

    def _forget(self) -> None:
        for one in self._passes.values():
            one.forget()
        self._passes.clear()
        weight = self.original.norm.weight
        self._weights, self._packs = self._places(), packs_on_device(self.original) or not weight.is_cuda

    def __getstate__(self) -> dict[str, Any]:
        """Copies have their own weights, so they cannot use these graphs."""
        return {**self.__dict__, "_passes": {}, "_stream": None}


def by_itself(model: LanguageModel) -> LanguageModel:
    """The same compiled model with its own graphs: alternating between active fractions would evict shared ones."""
    if not isinstance(model, PackedPasses):
        return model
    return PackedPasses(model.original, model.unpacked, model._until_decided)  # pyright: ignore[reportReturnType]
