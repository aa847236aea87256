"""Size and cost of a config before anything is trained: parameters, FLOPs per token, memory."""

from dataclasses import replace
from typing import Any

import torch

from tokendepth import data
from tokendepth.config import RunConfig, to_dict
from tokendepth.errors import UserError
from tokendepth.methods import outline
from tokendepth.runs.machine import memory_bytes

TRAINING_BYTES = 16
"""Per parameter: weights, gradient and AdamW's two moments in float32."""


def describe(config: RunConfig) -> dict[str, Any]:
    """Allocates no model, and reads no corpus if the size of the vocabulary is known."""
    vocabulary = config.model.vocab_size or data.vocab_size(config.data)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    model = outline(config)
    count = sum(p.numel() for p in model.parameters())
    sites = model.method.sites(keys=config.model.context)
    dense = model.head_flops + sum(site.always + site.active for site in sites)
    return {
        "recipe": config.recipe,
        "parameters": count,
        "router_parameters": sum(p.numel() for router in model.method.routers() for p in router.parameters()),
        "flops_per_token": round(dense + sum(site.router for site in sites)),
        "flops_per_token_without_routers": round(dense),
        "memory": {
            "weights_bytes": 4 * count,
            "training_state_bytes": TRAINING_BYTES * count,
            "kv_cache_bytes_per_token": 4 * 2 * model.method.cache_layers * config.model.kv_heads * config.model.width,
        },
        "config": to_dict(config),
    }


def check_fits(config: RunConfig, device: torch.device, ranks: int = 1) -> None:
    """A UserError if not even the minimum for training fits: the system may kill a process that asks for too much."""
    model, there = config.model, memory_bytes(device)
    more = f"more than the {there / 2**30:,.1f} GiB of this machine's {device.type}"
    count = sum(p.numel() for p in outline(config).parameters())
    some = config.retrofit is not None and config.retrofit.trains != "all"  # the others have no gradient
    weights = (4 if some else TRAINING_BYTES) * count
    if weights > there:
        raise UserError(
            f"a model of {count:,} parameters needs {weights / 2**30:,.1f} GiB for training, {more}; "
            "lower --model.d-model, --model.d-ff, --model.n-layer or --model.context"
        )
    sequences = config.train.batch_size // (config.train.accumulate * ranks)
    states = 4 * model.d_model * model.n_layer * model.context * sequences  # what enters each block, for its gradient
    if weights + states > there:
        at_once = "" if sequences == config.train.batch_size else f" ({sequences:,} at a time)"
        raise UserError(
            f"train.batch_size is {config.train.batch_size:,}{at_once}, which needs at least "
            f"{(weights + states) / 2**30:,.1f} GiB, {more}; lower --train.batch-size or --model.context, "
            "or raise --train.accumulate"
        )
