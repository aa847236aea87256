"""Run folders made by hand, since a report needs no training."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.tiny import add_rows
from tokendepth.config import METHOD_CONFIGS, DataConfig, ModelConfig, RunConfig, TrainConfig, TSAConfig
from tokendepth.runs.files import write_json, write_manifest
from tokendepth.runs.run import EVALUATION_VERSION, Run

TEXT = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\nFirst Citizen:\n"
    "You are all resolved rather to die than to famish?\n\nAll:\nResolved. resolved.\n"
)
LAYERS = 6


def passage(text: str = TEXT, routers: int = LAYERS - 1) -> dict[str, Any]:
    """Deterministic: spaces and line ends halt early, letters late."""
    rng = random.Random(0)
    soft = [
        [round(min(1, max(0, (0.45 if c.isspace() else 0.95) - 0.12 * site + rng.uniform(-0.2, 0.2))), 3) for c in text]
        for site in range(routers)
    ]
    return {
        "pieces": list(text),
        "sites": [f"block {i + 2}" for i in range(routers)],
        "soft": soft,
        "hard": [[int(keep > 0.5) for keep in row] for row in soft],
        "surprisal": [None] + [round(rng.expovariate(0.8), 3) for _ in text[1:]],
    }


def mode(loss: float, active: float) -> dict[str, Any]:
    per_site = [1.0] + [round(active + 0.2 - 0.1 * i, 4) for i in range(LAYERS - 1)]
    bits = loss / math.log(2)
    return {
        "loss": loss,
        "bits_per_character": bits,
        "bits_per_byte": bits,
        "active_fraction": active,
        "active_fraction_per_site": per_site,
    }


def dense_evaluation(loss: float = 1.4422) -> dict[str, Any]:
    whole = {**mode(loss, 1.0), "active_fraction_per_site": [1.0] * LAYERS}
    return {
        "version": EVALUATION_VERSION, "method": "dense", "recipe": "shakespeare.dense", "corpus": "shakespeare",
        "seed": 0, "split": "val", "tokens": 111539, "parameters": 4782336, "router_parameters": 0,
        "soft": whole, "hard": whole, "sparse": whole,
        "tlops_saved_soft": 0.0, "tlops_skipped": 0.0, "flops_skipped": 0.0, "flops_per_token": 1.1e7,
        "flops_per_token_dense": 1.1e7, "decision_flips": 0, "controls": {},
        "time": {"device": "cpu", "batch": 8, "context": 128, "dense_ms": [41.0, 40.1, 43.0],
                 "hard_ms": [41.2, 40.3, 42.9], "sparse_ms": [41.1, 40.0, 43.3], "speedup": 0.998},
        "passage": {**passage(), "sites": [], "soft": [], "hard": []},
    }  # fmt: skip


def tsa_evaluation(soft: float = 1.4482, hard: float = 1.4523, text: str = TEXT) -> dict[str, Any]:
    return {
        "version": EVALUATION_VERSION, "method": "tsa", "recipe": "shakespeare.tsa", "corpus": "shakespeare", "seed": 0,
        "split": "val", "tokens": 111539, "parameters": 4864901, "router_parameters": 82565, "soft": mode(soft, 0.726),
        "hard": mode(hard, 0.614), "sparse": mode(hard, 0.614), "tlops_saved_soft": 0.22833, "tlops_skipped": 0.32167,
        "flops_skipped": 0.24871, "flops_per_token": 8.3e6, "flops_per_token_dense": 1.1e7, "decision_flips": 3,
        "controls": {"untrained_router_soft": {"loss": 2.31, "active_fraction": 0.71},
                     "random_decisions_hard": {"loss": 2.87, "active_fraction": 0.61}},
        "time": {"device": "cpu", "batch": 8, "context": 128, "dense_ms": [41.0, 40.1, 43.0],
                 "hard_ms": [43.0, 42.1, 44.9], "sparse_ms": [33.1, 32.6, 34.4], "speedup": 1.2387},
        "passage": passage(text),
    }  # fmt: skip


def budget_evaluation(loss: float = 1.29798) -> dict[str, Any]:
    """Without a soft mode; the loss is 10% below that of `dense_evaluation`."""
    decided = {**passage(), "soft": passage()["hard"]}
    return {
        **tsa_evaluation(loss, loss), "method": "budget", "recipe": "shakespeare.budget", "has_soft": False,
        "tlops_skipped": 0.5, "flops_skipped": 0.40449, "flops_per_token": 6.55e6, "passage": decided,
    }  # fmt: skip


def metrics(final: float = 1.45, until: int = 5000, active: float = 1.0) -> list[dict[str, Any]]:
    rng, rows, per_step = random.Random(final), [], 64 * 128
    for step in range(50, until + 1, 50):
        spent = {"step": step, "tokens": step * per_step, "tlops": step * per_step * (1 + (LAYERS - 1) * active)}
        level = final + 2.2 * math.exp(-step / 350) + 0.25 * math.exp(-step / 1500)
        if step % 250 == 0:
            rows.append({**spent, "val_loss": level, "val_active_fraction": active})
        loss = level - 0.05 + rng.gauss(0, 0.02)
        rows.append({**spent, "loss": loss, "task_loss": loss, "depth_loss": 0.0, "active_fraction": active, "lr": 3e-4,
                     "grad_norm": 0.7, "tokens_per_s": 21000.0})  # fmt: skip
    return rows


def write_run(
    path: Path,
    method: str = "tsa",
    *,
    evaluation: dict[str, Any] | None = None,
    rows: list[dict[str, Any]] | None = None,
    seed: int = 0,
    finished: bool = True,
    env: dict[str, Any] | None = None,
    corpus: str = "shakespeare",
    penalty: float = 0.001,
    layers: int = LAYERS,
) -> Run:
    config = RunConfig(
        data=DataConfig(corpus=corpus),
        model=ModelConfig(n_layer=layers),
        method=TSAConfig(depth_penalty=penalty) if method == "tsa" else METHOD_CONFIGS[method](),
        train=replace(TrainConfig(), seed=seed),
        recipe=f"{corpus}.{method}",
    )
    run = Run.create(path, config, resume=False)
    (path / "metrics.jsonl").touch()
    add_rows(run, *(rows or []))
    if evaluation is not None:
        run.write_evaluation(evaluation)
    if env is not None:
        write_json(path / "env.json", env)
    if finished:
        write_manifest(path, ("config.json", "metrics.jsonl"), config.train.steps)
    return run
