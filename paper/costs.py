"""Costs of a trained model besides its FLOPs: time on a CPU, FLOPs of a training step, keys and values."""

from dataclasses import replace

import torch
from torch import Tensor

from tokendepth import data
from tokendepth.cache import KVCache
from tokendepth.config import RunConfig, to_dict
from tokendepth.measure.evaluate import batches, execute_at, load_model, time_forward
from tokendepth.measure.flops import training_flops
from tokendepth.methods import build
from tokendepth.model import LanguageModel
from tokendepth.runs.machine import environment
from tokendepth.runs.results import Row
from tokendepth.runs.run import Run

BATCH = 8
"""Sequences in the timed forward pass and in the measured cache."""


def measure(config: RunConfig, run: Run | None, at: float | None, dense: RunConfig, *, repeats: int = 15) -> Row:
    """Costs of `run`'s model, `at` a point of its curve if it has one, and its time relative to `dense`.

    A model without decisions needs no run: an untrained one costs the same.
    """
    cpu, dataset = torch.device("cpu"), data.load(config.data)
    model = build(config).eval() if run is None else load_model(run, cpu)
    if run is not None and at is not None:
        execute_at(model, run, at, dataset)
    ids = next(batches(dataset, "val", config.model.context, cpu))[0][:BATCH]
    dense = replace(dense, model=replace(dense.model, vocab_size=config.model.vocab_size))
    return {
        "config": to_dict(config),
        "training_flops_per_token": training_flops(config),
        **cached(model, ids),
        "time": time_forward(model, dense, ids, batch=BATCH, repeats=repeats),
        "env": environment(cpu),
    }


@torch.no_grad()
def cached(model: LanguageModel, ids: Tensor) -> Row:
    """Bytes of keys and values per token in float32: stored in the cache after reading `ids`, and reserved by it."""
    layers, width = model.method.cache_layers, 2 * 4 * model.config.d_model
    cache = KVCache(model.config, len(ids), ids.shape[1], layers=layers, like=model.embedding.weight)
    model(ids, execution="sparse", cache=cache)
    stored = int(cache.valid.sum()) / ids.numel()
    return {"kv_bytes_per_token": stored * width, "kv_bytes_reserved_per_token": layers * width}
