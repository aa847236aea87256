"""What adaptivity costs in training: the steps of TSA, of early exit and of budget routing that skips against the dense
one, interleaved; and one whole run."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tokendepth.clock import interleaved, quartiles
from tokendepth.config import (
    BudgetConfig,
    DataConfig,
    DenseConfig,
    EarlyExitConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    TSAConfig,
)
from tokendepth.machine import choose_device, environment
from tokendepth.methods import build
from tokendepth.results import Row, add_rows
from tokendepth.step import OptimiserStep, Ranks
from tokendepth.train import train

Shapes = dict[str, tuple[ModelConfig, int]]

PAPER_SHAPES: Shapes = {
    "d256 L6 V65, 64x128": (ModelConfig(context=128, vocab_size=65), 64),
    "d256 L6 V6064, 64x256": (ModelConfig(context=256, vocab_size=6064, dropout=0.0), 64),
}
SHAPES: Shapes = {
    **PAPER_SHAPES,
    "d768 L12 V50304, 16x1024": (ModelConfig(768, 12, 12, 3072, 1024, 0.0, 50304), 16),
    "d1024 L24 V50304, 8x1024": (ModelConfig(1024, 24, 16, 4096, 1024, 0.0, 50304), 8),
}
"""The paper's two, and GPT-2's small and medium. The last two are left out on a CPU, where they take minutes a step."""


def measure(device_name: str, results: Path) -> Iterator[Row]:
    """Yield the rows of this device, each written to results/training.json as soon as it is known."""
    device = choose_device(device_name)
    on_gpu = device.type == "cuda"
    if on_gpu:  # first, while nothing is compiled yet, as a user would find it
        yield _written(results, _whole_run(device))
    yield from measure_steps(SHAPES if on_gpu else PAPER_SHAPES, device, results)


def measure_steps(shapes: Shapes, device: torch.device, results: Path) -> Iterator[Row]:
    """The same for the steps alone, at the given shapes."""
    for shape, (model, batch) in shapes.items():
        row = _training_step(model, batch, device, repeats=100 if device.type == "cuda" else 9)
        yield _written(results, {"benchmark": "training step", "shape": shape, **row})


def _written(results: Path, row: Row) -> Row:
    add_rows(results / "training.json", [row], identity=("benchmark", "shape", "recipe", "device"))
    return row


def _training_step(model: ModelConfig, batch: int, device: torch.device, repeats: int) -> Row:
    dice = np.random.default_rng(0)
    inputs = dice.integers(model.vocab_size, size=(batch, model.context))
    skipping = BudgetConfig(budget=0.4, dial=False, distill=0)
    methods: dict[str, MethodConfig] = {"dense": DenseConfig(), "tsa": TSAConfig(), "budget": skipping}
    if model.vocab_size < 10_000:  # beyond, the logits of every exit do not fit
        methods["early_exit"] = EarlyExitConfig()
    steps = {}
    for name, method in methods.items():
        train_config = TrainConfig(batch_size=batch, compile="on" if device.type == "cuda" else "off")
        config = RunConfig(model=model, method=method, train=train_config)
        steps[name] = OptimiserStep(build(config).to(device).train(), config.train, device, Ranks())
    number = itertools.count()

    def taken(step: OptimiserStep) -> Callable[[], object]:
        return lambda: step(inputs, np.roll(inputs, -1, axis=1), step=next(number), lr=1e-4)

    times = interleaved({name: taken(step) for name, step in steps.items()}, repeats, device)
    ratios = {
        name: quartiles([own / dense for dense, own in zip(times["dense"], times[name], strict=True)])
        for name in methods
    }
    return {
        "dtype": "bfloat16, compiled, CUDA graph" if device.type == "cuda" else "float32, eager",
        **{f"{name}_ms": quartiles(values) for name, values in times.items()},
        "ratio": ratios["tsa"],
        **{f"{name}_ratio": ratios[name] for name in ("budget", "early_exit") if name in ratios},
        "repeats": repeats,
        **environment(device),
    }


def _whole_run(device: torch.device) -> Row:
    """5,000 Shakespeare steps as a user runs them, validation and checkpoints included.

    What a process does once comes first and is told apart: a run of one step waits for data, CUDA and kernels alike.
    """
    config = RunConfig(DataConfig("shakespeare"), ModelConfig(), TSAConfig(), TrainConfig(device="cuda"))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        train(replace(config, train=replace(config.train, steps=1)), Path(folder) / "start", show=False)
        started = time.perf_counter()
        run = train(config, Path(folder) / "run", show=False)
        seconds = time.perf_counter() - started
        rates = [row["tokens_per_s"] for row in run.metrics() if "tokens_per_s" in row]
    stepping = config.train.steps * config.train.batch_size * config.model.context / statistics.median(rates)
    times = {"seconds": seconds, "seconds_start": started - start, "seconds_stepping": stepping}
    facts = {"recipe": "shakespeare.tsa", "steps": config.train.steps, **times}
    return {"benchmark": "whole run", **facts, **environment(device)}
