"""The form of a model that runs fastest."""

from typing import cast

import torch

from tokendepth.machine import keep_freed_memory
from tokendepth.model import LanguageModel


def compiled(model: LanguageModel) -> LanguageModel:
    """The same model, compiled whole, skipping included: for inference, under `torch.no_grad()`.

    The first pass of a kind of execution or shape takes some ten seconds. On a CPU what a pass frees stays with the
    process; on a GPU nothing waits for the host, so that a pass can be captured as a graph.
    """
    if model.norm.weight.is_cuda:
        return cast(LanguageModel, torch.compile(model, dynamic=False))
    keep_freed_memory()
    # The number of active rows stays a symbol; else compaction would break the graph in every block.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return cast(LanguageModel, torch.compile(model))
