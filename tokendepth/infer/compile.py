"""The form of a model that runs fastest."""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tokendepth.model import LanguageModel, Output
from tokendepth.runs.machine import keep_freed_memory


def compiled(model: LanguageModel) -> LanguageModel:
    """The same model, compiled whole, skipping included: for inference, under `torch.no_grad()`.

    The first pass of a kind of execution or shape takes some ten seconds. On a CPU weights are packed for their
    products, and what a pass frees stays with the process; on a GPU nothing waits for the host, so that a pass can be
    captured as a graph.
    """
    if model.norm.weight.is_cuda:
        return cast(LanguageModel, torch.compile(model, dynamic=False))
    keep_freed_memory()
    # The number of active rows stays a symbol; else compaction would break the graph in every block.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    # Every model has code of its own, in every execution.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return cast(LanguageModel, Packed(model))


class Packed(nn.Module):
    """A model whose weights are constants to the compiler, which lays them out as products want them.

    Thresholds are not: they are given anew at every pass, so that a budget can be set at any time. Weights that have
    changed are packed again, but not those of a model in training, whose optimiser writes past them (`.data`).
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.original = model
        # With sizes that may vary, the compiler takes the library that packs for any number of rows.
        self._run = (torch.compile(model, dynamic=True),)  # in a tuple, since it is no part of its own

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        import torch._inductor.config as inductor

        _notice_changes(self.original)
        kwargs.setdefault("thresholds", self.original.method.live_thresholds())
        with inductor.patch(freezing=not torch.is_grad_enabled()):
            return self._run[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


_packed: WeakKeyDictionary[LanguageModel, list[tuple[int, int]]] = WeakKeyDictionary()
"""Weight addresses and versions at the last packing, by model: compiled code is shared between packings."""


def _notice_changes(model: LanguageModel) -> None:
    versions = [(weight.data_ptr(), weight._version) for weight in model.parameters()]
    if _packed.get(model, versions) != versions:
        torch.compiler.reset()
        _packed.clear()
    _packed[model] = versions
