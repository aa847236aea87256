"""Compile a model for inference."""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from tokendepth.infer.packed import PackedPasses, packs_on_device
from tokendepth.infer.wrapped import Wrapped
from tokendepth.model import LanguageModel, Output
from tokendepth.runs.machine import keep_freed_memory


def compiled(model: LanguageModel) -> LanguageModel:
    """The same model, compiled whole, skipping included: for inference, under `torch.no_grad()`.

    The first pass of each execution and shape, and of a span of each size of room, takes some ten seconds. On a CPU the
    weights are packed for matrix products, and the process keeps the memory that a pass frees; on a GPU nothing waits
    for the host, so that a pass can be captured as a CUDA graph. A span's tokens are packed there: such a pass is two
    graphs already, and the host waits until the device tells how many tokens there are.
    """
    # Each model is compiled separately, for each execution, and for each room that a span is packed into.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    if model.norm.weight.is_cuda:
        fast = torch.compile(model, dynamic=False)
        if not packs_on_device(model):
            return cast(LanguageModel, fast)
        until_decided = torch.compile(LanguageModel.until_decided, dynamic=False)
        return cast(LanguageModel, PackedPasses(model, fast, until_decided))
    keep_freed_memory()
    # Keep the number of active rows symbolic; else compaction would break the graph in every block.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return cast(LanguageModel, PackedWeights(model))


class PackedWeights(Wrapped):
    """A model whose weights are constants to the compiler, which packs them for matrix products.

    Thresholds are passed in at every call, so that a budget can be set at any time. Changed weights are packed again,
    unless they were changed through `.data`, as optimisers do: that leaves no trace.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        # With dynamic sizes the compiler uses the library that packs weights for any number of rows.
        self._run = (torch.compile(model, dynamic=True),)  # in a tuple, so that it is not registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        import torch._inductor.config as inductor

        _notice_changes(self.original)
        kwargs.setdefault("thresholds", self.original.method.live_thresholds())
        with inductor.patch(freezing=not torch.is_grad_enabled()):
            return self._run[0](*args, **kwargs)


_packed: WeakKeyDictionary[LanguageModel, list[tuple[int, int]]] = WeakKeyDictionary()
"""Weight addresses and versions at the last packing, by model: compiled code is shared between packings."""


def _notice_changes(model: LanguageModel) -> None:
    versions = [(weight.data_ptr(), weight._version) for weight in model.parameters()]
    if _packed.get(model, versions) != versions:
        torch.compiler.reset()
        _packed.clear()
    _packed[model] = versions
