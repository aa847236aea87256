"""Whole sequences through a span at library speed: the tokens that take it are packed, on a GPU too.

How many take it only the device knows, so a pass is two CUDA graphs: until that is decided, and the rest, with room for
so many rows. The device tells the number to the host. Where the text alone decides it does so at once, and the host
launches the second graph while the first one runs; where states decide, the device waits some microseconds for that.
Sizes of the room are a step apart, so that few graphs serve all texts; rows too many are computed and read by nobody.
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
"""The room grows by a 32nd of the tokens, in whole tiles of the library's products."""
GRAPHS, SHAPES = 8, 8
"""How many graphs of a shape are kept, one for each size of room, and of how many shapes; each takes memory."""
CAN_BE_GIVEN = {"thresholds", "decisions"}
UntilDecided = Callable[..., tuple[Tensor, Tensor, Tensor | None]]
"""As `LanguageModel.until_decided`, with the model as first argument: a copy of a model has its own."""


def packs_on_device(model: LanguageModel) -> bool:
    """Whether its passes can be packed where its weights are, a GPU."""
    weight = model.norm.weight
    if not weight.is_cuda or torch.version.hip is not None or not has_triton():
        return False
    flash = torch.cuda.get_device_capability(weight.device) >= (8, 0) and flash_takes(model.config.width)
    return flash and model.method.packs and weight.dtype in LOW_PRECISION


class PackedPass:
    """Sparse passes over sequences of one shape, without a cache or a gradient.

    `until_decided` and `forward` are the model's own or what a compiler made of them; `given` goes to both with every
    call. What a call returns is overwritten by the next one.
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
        with torch.inference_mode(False):  # else later passes could not write to them
            self._ids, self._given = ids.clone(), {name: part.clone() for name, part in given.items()}
            # How many tokens take the span; -1 from the beginning of a pass until the device has told it.
            self._host_count = torch.zeros((), dtype=torch.long, pin_memory=ids.is_cuda)
        self._step = TILE * math.ceil(ids.numel() / STEPS / TILE)
        self._beside = torch.cuda.Stream(ids.device) if ids.is_cuda and model.method.decides_by_text else None
        # Second graphs share memory, since only the last result is read; what they read of the first is kept alive.
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
        with torch.cuda.device_of(self._ids):  # graphs are captured on the current device
            if ids is not None:
                self._ids.copy_(ids)
            for name, part in given.items():
                self._given[name].copy_(part)
            self._begin()
            return self._end(self.room_for(self._count()))

    def forget(self) -> None:
        """Free the memory of its graphs; one of them may be running yet."""
        if self._ids.is_cuda:
            torch.cuda.synchronize(self._ids.device)
            self._pool = torch.cuda.graph_pool_handle()
        self._first = self._scored = None
        self._graphs.clear()
        self._found.clear()

    def _begin(self) -> None:
        if self._first is None:
            this = weakref.proxy(self)  # a graph keeps what it calls: this one is free as soon as nobody has it
            self._first = captured(lambda: this._decide(), self._ids.device, pool=self._pool)
        if self._host_count < 0:  # a pass before was interrupted, and may tell its number yet
            torch.cuda.synchronize(self._ids.device)
        self._host_count.fill_(-1)
        self._first()

    def _decide(self) -> None:
        """On a GPU the text decides on a branch of the graph: blocks need not wait for it, nor it for them."""
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
        """As soon as it is told; by the end of the first part it is."""
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
        self._graphs[room] = graph  # the last used stands last
        graph()
        return self._found[room]

    def _rest(self, room: int) -> None:
        how = {"execution": "sparse", "room": room, "scored": self._scored}
        self._found[room] = self._forward(self._ids, **how, **self._given)


class PackedPasses(Wrapped):
    """A compiled model whose sparse passes over whole sequences are packed; all others are as they were compiled.

    Such a pass is CUDA graphs of its own, so it cannot be captured in another one.
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
        if not self._packs:  # its weights were moved to another device, or are of another type now
            return self.unpacked(ids, execution=execution, **given)
        if ids.is_cuda and self._stream != (stream := torch.cuda.current_stream(ids.device)):
            torch.cuda.synchronize(ids.device)  # a pass on another stream may be running yet, and share memory
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
        self._passes[kind] = found  # the last used stands last
        return found

    def _places(self) -> tuple[int, int]:
        """Where weights are that are moved whenever a model is: graphs read the places that they were captured with."""
        return self.original.norm.weight.data_ptr(), self.original.embedding.weight.data_ptr()

    def _forget(self) -> None:
        for one in self._passes.values():
            one.forget()
        self._passes.clear()
        weight = self.original.norm.weight
        self._weights, self._packs = self._places(), packs_on_device(self.original) or not weight.is_cuda

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose weights are elsewhere."""
        return {**self.__dict__, "_passes": {}, "_stream": None}


def by_itself(model: LanguageModel) -> LanguageModel:
    """The same compiled model with graphs of its own, for passes of many shares in turns, lest they drop graphs."""
    if not isinstance(model, PackedPasses):
        return model
    return PackedPasses(model.original, model.unpacked, model._until_decided)  # pyright: ignore[reportReturnType]
