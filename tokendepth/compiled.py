"""The form of a model that runs fastest."""

from typing import Any, cast

import torch

from tokendepth.machine import keep_freed_memory
from tokendepth.model import LanguageModel, Output


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
    return cast(LanguageModel, Packed(model))


class Packed:
    """A model whose weights are constants to the compiler, which lays them out as products want them.

    Thresholds are not: they are given anew at every pass, so that a budget can be set at any time. Weights that have
    changed are packed again.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        # With sizes that may vary, the compiler takes the library that packs for any number of rows.
        self._run = torch.compile(model, dynamic=True)
        self._packed = self._versions()

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        import torch._inductor.config as inductor

        if (versions := self._versions()) != self._packed:
            torch.compiler.reset()
            self._packed = versions
        kwargs.setdefault("thresholds", self._model.method.live_thresholds())
        with inductor.patch(freezing=not torch.is_grad_enabled()):
            return self._run(*args, **kwargs)

    def _versions(self) -> list[tuple[int, int]]:
        """Of each weight where it is and how often it was written to."""
        return [(weight.data_ptr(), weight._version) for weight in self._model.parameters()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
