"""A results folder of made-up numbers, as a finished reproduction leaves it: for the page and its figures."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from paper import tables
from tokendepth.config import PAPER_THRESHOLDS, EarlyExitConfig, RunConfig, TSAConfig, to_dict
from tokendepth.runs.results import add_rows

ENV = {"device": "Abacus 9000", "commit": "0123456789ab"}
PER_SITE = [1.0, 0.55, 0.8, 0.85, 0.8, 0.85]


def evaluation(config: RunConfig, seed: int, *, executed_worse: float = 0.16) -> dict[str, Any]:
    """Plausible in shape and size, but not a real result."""
    layers = config.model.n_layer
    penalty = config.method.depth_penalty if isinstance(config.method, TSAConfig) else 0.0
    loss = 1.44 + 0.004 * seed + 0.006 * (6 - layers) ** 2 + 0.19 * penalty
    alpha = 1.0 if not isinstance(config.method, TSAConfig) else 0.76 / (1 + 20 * penalty)
    hard = loss + (executed_worse * (1 + 10 * penalty) if alpha < 1 else 0)
    figures = {
        "soft": _figures(loss, alpha, layers),
        "hard": _figures(hard, alpha, layers),
        "sparse": _figures(hard, alpha, layers),
    }
    saved = (1 - alpha) * (layers - 1) / layers
    curve = []
    if isinstance(config.method, EarlyExitConfig):
        for threshold in (1.0, *PAPER_THRESHOLDS):
            point = _figures(loss + 0.08 * (1 - threshold) ** 2, 0.3 + 0.7 * threshold**2, layers)
            skipped = 1 - point["active_fraction"]
            read = _figures(loss + 0.04 * (1 - threshold) ** 2, point["active_fraction"], layers)
            counted = {"read_early": read, "tlops_saved_read_early": skipped}
            taken = {"sparse": point, "tlops_skipped": skipped, "flops_per_token": 1.0}
            curve.append({"threshold": threshold, **taken, **counted})
    return {
        "version": 1, "parameters": 1_000_000 * layers, **figures, "tlops_saved_soft": saved, "tlops_skipped": saved,
        "flops_skipped": 0.8 * saved, "flops_per_token": 1e6 * layers * (1 - 0.8 * saved), "curve": curve,
        "controls": {"untrained_router_hard": {"loss": 1.48, "active_fraction": 1.0},
                     "random_decisions_hard": {"loss": 1.66}, "kept_weights_hard": {"loss": 1.5}},
    }  # fmt: skip


def _figures(loss: float, alpha: float, layers: int) -> dict[str, Any]:
    sites = [min(1.0, alpha * site / 0.77) for site in PER_SITE][:layers]
    bits = {
        "bits_per_character": loss / math.log(2),
        "bits_per_byte": loss / math.log(2),
        "accuracy": 0.99,
        "perplexity": math.exp(loss - 1.4),
    }
    return {"loss": loss, "active_fraction": alpha, "active_fraction_per_site": [1.0, *sites[1:]], **bits}


def history(config: RunConfig, seed: int) -> list[dict[str, Any]]:
    share = 0.8 if isinstance(config.method, TSAConfig) else 1.0
    steps = range(250, 5001, 250)
    return [
        {
            "step": step,
            "tlops": share * step * 49152,
            "val_loss": 1.43 + 0.004 * seed + 2.2 * math.exp(-step / 700),
            "val_active_fraction": share,
        }
        for step in steps
    ]


def write_results(folder: Path, seeds: int = 3) -> Path:
    rows = []
    for label, config in tables.experiments().items():
        for seed in range(seeds):
            seeded = replace(config, train=replace(config.train, seed=seed))
            name = f"{label}-seed{seed}"
            row = {"name": name, "config": to_dict(seeded), "evaluation": evaluation(seeded, seed)}
            rows.append(row | {"trained_on": ENV, "evaluated_on": ENV, "history": history(seeded, seed)})
    add_rows(folder / "reproduction.json", rows, identity=("config",))
    routed = [row for row in rows if row["name"].rsplit("-", 1)[0] in tables.ROUTING]
    add_rows(folder / "routing.json", [_routing(row) for row in routed], identity=("config",))
    starts = [row for row in rows if row["name"].startswith(tables.TSA + "-seed")]
    mode = {"soft": {"active_fraction": 0.731}, "hard": {"active_fraction": 1.0}}
    add_rows(
        folder / "initialisation.json",
        [{"name": r["name"], "config": r["config"], **mode} for r in starts],
        ("config",),
    )
    write_times(folder)
    call = {"call": 0, "table": "all", "seeds": seeds, "minutes": 1.5, "runs": len(rows), "measurements": 0, **ENV}
    add_rows(folder / "reproduction_calls.json", [call], identity=("call",))
    return folder


def _routing(row: dict[str, Any]) -> dict[str, Any]:
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
    grid = [[round(0.5 + 0.5 * math.sin(3 * s + ord(c)), 3) for c in text] for s in range(5)]
    passage = {"pieces": list(text), "sites": [f"block {n}" for n in range(1, 6)], "soft": grid}
    passage |= {"hard": [[int(v > 0.4) for v in line] for line in grid], "surprisal": [None] * len(text)}
    mode = {
        "per_router": PER_SITE[1:],
        "spread_of_depth": 0.05,
        "layer_share_of_variance": 0.8,
        "rank_correlation": {"surprisal of the token": 0.1, "surprisal of the next": 0.2},
    }
    groups = [{"kind": "character class", "group": "letter", "share": 1.0, "soft": [0.8] * 5, "hard": [0.7] * 5}]
    found = {"groups": groups, "modes": {"soft": mode, "hard": mode}, "passage": passage}
    return {"name": row["name"], "config": row["config"], **found}


def write_times(folder: Path) -> None:
    from paper import wallclock

    protocol, rows = wallclock.Protocol(), []
    for condition in [*wallclock.fraction_sweep(protocol), *wallclock.batch_scaling(protocol)]:
        about = {**vars(condition), "condition": condition.name, "benchmark": "forward pass", "shape": protocol.shape}
        alpha = condition.active_fraction or 1.0
        speed = 1.2 - 0.25 * alpha - (0.05 if condition.positions == "random" else 0)
        speed += 0.3 * (1 - alpha) if condition.skip == "block" else 0
        rows.append({**about, "dense_ms": [5.0, 4.9, 5.1], "ms": [5 / speed] * 3, "speedup": speed,
                     "speedup_quartiles": [speed - 0.01, speed + 0.01], **ENV})  # fmt: skip
    add_rows(folder / "wallclock.json", rows, identity=wallclock.IDENTITY)
    step = {"benchmark": "training step", "shape": "d256 L6 V65, 64x128", "dense_ms": [3.0] * 3, "tsa_ms": [3.1] * 3}
    exits = {"ratio": [1.05] * 3, "early_exit_ms": [4.0] * 3, "early_exit_ratio": [1.33] * 3}
    (folder / "training.json").write_text(json.dumps([{**step, **exits, **ENV}]))
