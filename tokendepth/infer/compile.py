"""Compile a model for inference."""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from tokendepth.infer.packed import PackedPasses, packs_on_device
from tokendepth.infer.wrapped import Wrapped
from tokendepth.model import LanguageModel, Output
from tokendepth.runs.machine import keep_freed_memory


def compiled(model: LanguageModel) -> LanguageModel:
    """The same model compiled as a whole, including the skipping; for inference under `torch.no_grad()`.

    The first forward pass takes about ten seconds for each execution and shape (with packed spans also for each packed
    size). On a CPU the weights are prepacked for matrix products, and the process keeps memory that a pass frees. On a
    GPU nothing waits for the host, so a pass can be captured as a CUDA graph. The exception is a model whose span
    packs its tokens: such a pass already consists of two graphs, and in between the host waits for the token count.
    """
    # Compiled separately for each model, execution and packed size.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    if model.norm.weight.is_cuda:
        fast = torch.compile(model, dynamic=False)
        if not packs_on_device(model):
            return cast(LanguageModel, fast)
        until_decided = torch.compile(LanguageModel.until_decided, dynamic=False)
        return cast(LanguageModel, PackedPasses(model, fast, until_decided))
    keep_freed_memory()
    # Keep the number of active rows symbolic; otherwise compaction would break the graph in every block.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return cast(LanguageModel, PackedWeights(model))


class PackedWeights(Wrapped):
    """A model whose weights are constants for the compiler, which prepacks them for matrix products.

    Thresholds are passed in at every call, so the budget can change at any time. Changed weights are packed again,
    except if only some were changed without an update of their version: through `.data`, numpy or a fused optimiser.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        # Only with dynamic sizes does the compiler prepack weights for any number of rows.
        self._run = (torch.compile(model, dynamic=True),)  # in a tuple, so that it is not registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        import torch._inductor.config as inductor

        _notice_changes(self.original)
        kwargs.setdefault("thresholds", self.original.method.live_thresholds())
        with inductor.patch(freezing=not torch.is_grad_enabled()):
            return self._run[0](*args, **kwargs)


_packed: WeakKeyDictionary[LanguageModel, tuple[list[tuple[int, int]], list[float]]] = WeakKeyDictionary()
"""Weight addresses, versions and the last norm's weights at the last packing: compiled code is shared by packings."""


def _notice_changes(model: LanguageModel) -> None:
    # Fused optimisers do not update versions, but training changes all weights, so those of one norm tell.
    state = [(weight.data_ptr(), weight._version) for weight in model.parameters()], model.norm.weight.tolist()
    if _packed.get(model, state) != state:
        torch.compiler.reset()
        _packed.clear()
    _packed[model] = state
