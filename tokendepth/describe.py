"""What a config amounts to before anything is trained: parameters, FLOPs per token, memory."""

from dataclasses import replace
from typing import Any

import torch

from tokendepth import data
from tokendepth.config import RunConfig, to_dict
from tokendepth.methods import build


def describe(config: RunConfig) -> dict[str, Any]:
    """Needs no corpus where its vocabulary is known."""
    vocabulary = config.model.vocab_size or data.vocab_size(config.data)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    model = build(config).eval()
    with torch.no_grad():
        depth = model(torch.zeros(1, config.model.context, dtype=torch.long)).trace.totals()
    count = sum(p.numel() for p in model.parameters())
    return {
        "recipe": config.recipe,
        "parameters": count,
        "router_parameters": sum(p.numel() for router in model.method.routers() for p in router.parameters()),
        "flops_per_token": round(depth.flops / depth.tokens),
        "flops_per_token_without_routers": round(depth.flops_dense / depth.tokens),
        "memory": {
            "weights_bytes": 4 * count,
            "training_state_bytes": 16 * count,  # weights, gradient and AdamW's two moments in float32
            "kv_cache_bytes_per_token": 4 * 2 * model.method.cache_layers * config.model.d_model,
        },
        "config": to_dict(config),
    }
