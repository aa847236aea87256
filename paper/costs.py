"""Costs of a trained model besides its FLOPs: time on a CPU, FLOPs of a training step, keys and values."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from tokendepth import data
from tokendepth.config import RunConfig, to_dict
from tokendepth.measure.evaluate import batches, execute_at, load_model, time_forward
from tokendepth.measure.flops import training_flops
from tokendepth.methods import build, outline
from tokendepth.runs.machine import environment
from tokendepth.runs.results import Row
from tokendepth.runs.run import Run
from tokendepth.trace import Site

BATCH = 8
"""Sequences in the timed forward pass."""
FLOAT32 = 4
"""Bytes."""


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
        "time": time_forward(model, dense, ids, batch=BATCH, repeats=repeats),
        "env": environment(cpu),
    }


def keys_and_values(config: RunConfig, shares: Sequence[float]) -> tuple[float, float]:
    """Bytes of keys and values per token in float32: stored in the cache, and reserved by it.

    shares: for each site, the share of tokens that it processed. Where they alone leave keys, no FLOPs are spent on the
    keys of all tokens.
    """
    sites, token = _kept_at(config)
    every = [not site.routed or site.always > 0 for site in sites]
    blocks = [site.blocks for site in sites]
    stored = sum(n * (1.0 if all_ else share) for n, all_, share in zip(blocks, every, shares, strict=True))
    return token * stored, token * sum(blocks)


@functools.cache
def _kept_at(config: RunConfig) -> tuple[tuple[Site, ...], int]:
    """Where keys and values are kept, and the bytes of one token in one block, whatever the vocabulary."""
    model = replace(config.model, vocab_size=config.model.vocab_size or 1)
    method = outline(replace(config, model=model)).method
    sites = method.sites(model.context)
    assert method.cache_layers == sum(site.blocks for site in sites), "each block has its own; none are shared"
    return sites, 2 * model.kv_heads * model.width * FLOAT32
