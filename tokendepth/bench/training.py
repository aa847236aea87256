"""Training benchmarks: steps of TSA, early exit and budget routing at 0.4 compared with dense ones, and a whole run."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

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
from tokendepth.measure.clock import WARM_UP, interleaved, quartiles
from tokendepth.methods import build
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment, freed_memory_kept
from tokendepth.runs.results import Row, add_rows
from tokendepth.training.loop import train
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

Shapes = dict[str, tuple[ModelConfig, int]]
Methods = dict[str, MethodConfig]

PAPER_SHAPES: Shapes = {
    "d256 L6 V65, 64x128": (ModelConfig(context=128, vocab_size=65), 64),
    "d256 L6 V6064, 64x256": (ModelConfig(context=256, vocab_size=6064, dropout=0.0), 64),
}
WIDE_SHAPES: Shapes = {"d768 L12 V50304, 16x1024": (ModelConfig(768, 12, 12, 3072, 1024, 0.0, 50304), 16)}
"""The shape of GPT-2 small; left out on a CPU, where a step takes minutes."""
DEEP_SHAPES: Shapes = {"d1024 L24 V50304, 8x1024": (ModelConfig(1024, 24, 16, 4096, 1024, 0.0, 50304), 8)}
"""The shape of GPT-2 medium, only for the steps that skip, since it takes minutes to compile."""
SKIPPING: Methods = {"budget": BudgetConfig(budget=0.4, dial=False, distill=0)}


def measure(device_name: str, results: Path) -> Iterator[Row]:
    """Rows for this device, each written to `results`/training.json as soon as it is known."""
    device = choose_device(device_name)
    on_gpu = device.type == "cuda"
    if on_gpu:  # first, before anything is compiled, as when a user starts training
        yield _written(results, _whole_run(device))
    shapes = PAPER_SHAPES | (WIDE_SHAPES if on_gpu else {})
    yield from measure_steps(shapes, device, results)
    yield from measure_skipping(shapes | (DEEP_SHAPES if on_gpu else {}), device, results)


def measure_steps(shapes: Shapes, device: torch.device, results: Path) -> Iterator[Row]:
    """Time per training step of TSA and early exit, for the given shapes."""
    with Progress("bench training: steps", len(shapes), unit="shapes") as progress:
        for shape, (model, batch) in shapes.items():
            methods: Methods = {"tsa": TSAConfig()}
            if model.vocab_size < 10_000:  # with more tokens the logits of every exit do not fit in memory
                methods["early_exit"] = EarlyExitConfig()
            row = _step(shape, model, batch, methods, device)
            yield _written(results, {"benchmark": "training step", "shape": shape, **row})
            progress.advance()


def measure_skipping(shapes: Shapes, device: torch.device, results: Path) -> Iterator[Row]:
    """Time per training step that works on 0.4 of the tokens."""
    with Progress("bench training: steps that skip", len(shapes), unit="shapes") as progress:
        for shape, (model, batch) in shapes.items():
            row = _step(shape, model, batch, SKIPPING, device)
            yield _written(results, {"benchmark": "skipping step", "shape": shape, **row})
            progress.advance()


def _written(results: Path, row: Row) -> Row:
    add_rows(results / "training.json", [row], identity=("benchmark", "shape", "recipe", "device"))
    return row


def _step(shape: str, model: ModelConfig, batch: int, methods: Methods, device: torch.device) -> Row:
    """Time per optimiser step of each method, compared with a dense model."""
    on_gpu, dice = device.type == "cuda", np.random.default_rng(0)
    inputs = dice.integers(model.vocab_size, size=(batch, model.context))
    steps = {}
    for name, method in {"dense": DenseConfig(), **methods}.items():
        train_config = TrainConfig(batch_size=batch, compile="on" if on_gpu else "off")
        config = RunConfig(model=model, method=method, train=train_config)
        steps[name] = OptimiserStep(build(config).to(device).train(), config.train, device, Ranks())
    number = itertools.count()

    def taken(step: OptimiserStep) -> Callable[[], object]:
        return lambda: step(inputs, np.roll(inputs, -1, axis=1), step=next(number), lr=1e-4)

    repeats = 100 if on_gpu else 9
    with (
        freed_memory_kept(device),  # as in training
        Progress(f"{shape}: timing {', '.join(steps)}", WARM_UP + repeats, unit="rounds") as progress,
    ):
        times = interleaved({name: taken(step) for name, step in steps.items()}, repeats, device, progress=progress)
    ratios = {
        "ratio" if name == "tsa" else f"{name}_ratio": quartiles(
            [own / dense for dense, own in zip(times["dense"], times[name], strict=True)]
        )
        for name in methods
    }
    return {
        "dtype": "bfloat16, compiled, CUDA graph" if on_gpu else "float32, eager",
        **{f"{name}_ms": quartiles(values) for name, values in times.items()},
        **ratios,
        "repeats": repeats,
        **environment(device),
    }


def _whole_run(device: torch.device) -> Row:
    """A training run on Shakespeare as users run it, with validation and checkpoints.

    A one-step run comes first; it includes the start-up of the process (data, CUDA, kernels), which is reported
    separately.
    """
    config = RunConfig(DataConfig("shakespeare"), ModelConfig(), TSAConfig(), TrainConfig(device="cuda"))
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress("bench training: a whole run, with its start", 2, unit="runs"),
    ):
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
