"""Speedup of decoding with skipping, relative to the fastest dense decoding available on the same machine.

Before anything is timed, sparse must equal hard for the same decisions that will be timed. Conditions are interleaved,
so that drift affects all equally; routers run inside the timed region. On a GPU a condition is a CUDA graph of several
steps, each with its own decisions. Dense is the fastest of eager, compiled (`static_dense`) and our own kernels with
every token active.

Decoding is bound by memory bandwidth, so the ceiling is the ratio of bytes read (weights and cached keys and values),
dense over sparse. A block's weights are read if any token of the batch is active there.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokendepth.bench import forward
from tokendepth.bench.forward import (
    SMOLLM2,
    as_served,
    built,
    check_equal,
    figures_of,
    in_float32,
    parse_batches,
    parse_fractions,
    sequences,
)
from tokendepth.bench.static_dense import StaticDense
from tokendepth.cache import KVCache
from tokendepth.config import DenseConfig, ModelConfig, TSAConfig, method_name
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.infer.engine import decode_one, prefill
from tokendepth.measure import calibrate
from tokendepth.measure.clock import WARM_UP, captured, interleaved, quartiles
from tokendepth.measure.evaluate import load_model
from tokendepth.model import LanguageModel
from tokendepth.ops.few_rows.eager import PackedMatrices
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows
from tokendepth.runs.run import Run
from tokendepth.trace import DepthTrace, Execution

__all__ = ["in_words", "measure", "measure_run", "parse_batches", "parse_fractions", "parse_shapes"]

FRACTIONS = (0.2, 0.4, 0.6, 0.8, 1.0)
STEPS = 8
"""Tokens per condition, each with its own decisions."""
REPEATS = {"cuda": 20, "cpu": 10}


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    contexts: tuple[int, ...]
    """Number of tokens that a step attends to."""
    batches: tuple[int, ...] = (1, 8, 64)
    on_cpu: tuple[int, ...] = ()
    """Batch sizes for a CPU, where larger ones take minutes and gigabytes."""


SHAPES = {
    "paper": Shape(ModelConfig(context=256, vocab_size=6064, dropout=0.0), (256,), on_cpu=(1, 8, 64)),
    "gpt2": Shape(ModelConfig(768, 12, 12, 3072, 1024, 0.0, 50304), (1024,), on_cpu=(1,)),
    "d1024": Shape(ModelConfig(1024, 24, 16, 4096, 1024, 0.0, 50304), (1024, 128)),
    "smollm2": Shape(SMOLLM2, (1024,), on_cpu=(1,)),
}

Decisions = list[Tensor | None]
"""For each step `[routed site, batch, 1]`; None: the model decides."""


def parse_shapes(text: str | None) -> tuple[str, ...] | None:
    return forward.parse_shapes(text, SHAPES)


def in_words(row: Row) -> str:
    return (
        f"{row['shape']}, batch {row['batch']}, context {row['context']}, active {row['active_fraction']:.3f}: "
        f"{row['dense_ms'][0]:.3f} ms {row['best_dense']}, {row['sparse_ms'][0]:.3f} ms sparse "
        f"({row['tokens_per_s']:.0f} tokens/s): {row['speedup']:.2f}x, ceiling by bytes read {row['ceiling']:.2f}x"
    )


def measure(
    device_name: str,
    results: Path,
    fractions: tuple[float, ...] = FRACTIONS,
    batches: tuple[int, ...] | None = None,
    shapes: tuple[str, ...] | None = None,
) -> Iterator[Row]:
    """Rows for random decisions at each fraction, each written to `results`/decode.json as soon as it is known.

    `batches` replaces the batch sizes of every shape. By default all `shapes` are measured.
    """
    device, shapes = choose_device(device_name), shapes or tuple(SHAPES)
    cells = [
        (name, batch, context)
        for name in shapes
        for context in SHAPES[name].contexts
        for batch in batches or (SHAPES[name].batches if device.type == "cuda" else SHAPES[name].on_cpu)
    ]
    if not cells:
        raise UserError(f"--shapes {','.join(shapes)} is for a GPU; expected --device cuda, or --batches 1 to try it")
    with Progress("bench decode", len(cells), unit="batch sizes") as progress:
        for name, batch, context in cells:
            adaptive = built(SHAPES[name].model, TSAConfig(), device)
            dice = torch.Generator().manual_seed(0)
            sites = sum(site.routed for site in adaptive.method.sites(keys=1))
            draws = torch.rand(STEPS, sites, batch, 1, generator=dice).to(device)
            cases: dict[float | None, Decisions] = {fraction: list(draws < fraction) for fraction in fractions}
            tokens = torch.randint(adaptive.config.vocab_size, (STEPS, batch), generator=dice).to(device)
            start = _noise(adaptive, batch, context)
            facts = {"benchmark": "decode", "shape": name, "positions": "random", "run": None}
            for row in _compared(name, adaptive, start, tokens, cases):
                yield _write(results, {**facts, **row, **environment(device)})
            progress.advance()


def measure_run(
    path: Path,
    device_name: str,
    results: Path,
    batches_asked: tuple[int, ...] | None = None,
    corpus: str | None = None,
) -> Iterator[Row]:
    """Rows for a trained run whose own routers decide, token by token along its validation text."""
    run, device = Run.open(path), choose_device(device_name)
    with Progress(f"reading {path} and its corpus"):
        dataset, trained = dataset_of(run, corpus), load_model(run, device)
    served = as_served(copy.deepcopy(trained))
    if device.type == "cuda" and not served.can_be_captured:
        raise UserError(
            f"{path} cannot be timed on a GPU, where a step is one graph: expected a method that decides "
            "on the device, d_model a multiple of 64, d_ff of 16, heads of 16 numbers or more; take --device cpu"
        )
    text, sizes = sequences(run, dataset, device, batches_asked)
    budgets = list(figures_of(run)) if run.evaluation else [None]
    context = text.shape[1]
    if context <= STEPS:
        raise UserError(f"{path} has a context of {context}; expected more than {STEPS} tokens to decode")
    with Progress(f"bench decode of {run.name}", len(sizes) * len(budgets), unit="cells") as progress:
        for batch in sizes:
            for budget in budgets:
                if budget is not None:
                    calibrate.set_budget(trained, run, budget, dataset, show=True)
                    served.method.set_thresholds(trained.method.thresholds)
                start = _empty_cache(served, batch, context)
                with torch.no_grad():
                    prefill(served, start, text[:batch, : context - STEPS].tolist(), "sparse")
                tokens = text[:batch, context - STEPS :].T.contiguous()
                facts = {"benchmark": "decode", "shape": run.name, "positions": "trained", "run": run.name}
                facts |= {"checkpoint": run.fingerprint, "method": method_name(run.config.method)}
                cases = {budget: _decided(served, start, tokens)}
                for row in _compared(run.name, served, start, tokens, cases):
                    yield _write(results, {**facts, **row, **environment(device)})
                progress.advance()


@torch.no_grad()
def _decided(model: LanguageModel, start: KVCache, tokens: Tensor) -> Decisions:
    """The model's own decisions at each step. They are forced on all executions, so that rounding cannot flip any."""
    routed = torch.tensor([site.routed for site in model.method.sites(keys=1)], device=tokens.device)
    if not routed.any():
        return [None] * STEPS
    return [trace.work[routed] > 0.5 for _, trace in _Steps(model, start, tokens, [None] * STEPS)("hard")]


def _write(results: Path, row: Row) -> Row:
    """Write to `results`/decode.json, replacing a row that was measured the same way."""
    identity = ("benchmark", "shape", "positions", "batch", "context", "asked", "dtype", "device")
    add_rows(results / "decode.json", [row], identity=identity)
    return row


# --- caches -----------------------------------------------------------------------------------------------------------


def _empty_cache(model: LanguageModel, batch: int, context: int) -> KVCache:
    like = model.norm.weight.detach()
    return KVCache(
        model.config, batch, context, layers=model.method.cache_layers, like=like, fixed=like.is_cuda, croppable=False
    )


def _noise(model: LanguageModel, batch: int, context: int) -> KVCache:
    """A cache filled with random keys and values, up to the last `STEPS` of `context` tokens."""
    cache = _empty_cache(model, batch, context)
    for part in (cache.keys, cache.values):
        part.normal_()
    cache.valid[:, :, : context - STEPS] = True
    cache.lengths.fill_(context - STEPS)
    cache.bounds[:] = [context - STEPS] * batch
    return cache


class _Steps:
    """Decodes the same tokens repeatedly from the same cache state."""

    def __init__(self, model: LanguageModel, start: KVCache, tokens: Tensor, decisions: Decisions) -> None:
        self.model, self.tokens, self.cache = model, tokens, copy.copy(start)
        for name in ("valid", "lengths"):
            setattr(self.cache, name, getattr(start, name).clone())
        for name in ("keys", "values"):
            setattr(self.cache, name, getattr(start, name).to(model.norm.weight.dtype, copy=True))
        self.cache._whole, self.cache.bounds = self.cache, list(start.bounds)
        self.cache.states = {name: state.clone() for name, state in start.states.items()}
        self.lengths, self.bounds = start.lengths, list(start.bounds)
        self.states = {name: state.clone() for name, state in start.states.items()}
        self.forced = [{} if made is None else model.forcing(made) for made in decisions]

    def go_back(self) -> None:
        """Forget the decoded tokens. Keys beyond the length stay: they are overwritten before they are read."""
        self.cache.lengths.copy_(self.lengths)
        for name, state in self.states.items():
            self.cache.states[name].copy_(state)
        self.cache.bounds[:] = self.bounds

    def __call__(self, execution: Execution) -> list[tuple[Tensor, DepthTrace]]:
        self.go_back()
        found = []
        for tokens, forced in zip(self.tokens, self.forced, strict=True):
            thresholds = forced.get("thresholds")
            if "decisions" in forced:
                out = self.model(tokens[:, None], execution=execution, cache=self.cache, decisions=forced["decisions"])
                found.append((out.logits[:, -1], out.trace))
            else:
                one = decode_one(self.model, self.cache, tokens, execution, thresholds=thresholds)
                found.append((one.logits, one.trace))
        return found


# --- timing -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _compared(
    name: str, model: LanguageModel, start: KVCache, tokens: Tensor, cases: dict[float | None, Decisions]
) -> list[Row]:
    """A row for each set of decisions, all timed against each other."""
    device, batch, context = tokens.device, start.batch, start.capacity
    conditions: dict[tuple[str, float | None], Callable[[], object]] = {}
    traces = {}
    title = f"{name}, batch {batch}, context {context}"
    with Progress(f"{title}: compiling and checking", len(cases), unit="fractions") as progress:
        dense, exact = built(model.config, DenseConfig(), device), in_float32(model)
        packed = PackedMatrices([*model.parameters(), *dense.parameters()])  # as in an engine
        baselines = _dense_conditions(dense, batch, context, tokens)
        for fraction, decisions in cases.items():
            steps = _Steps(model, start, tokens, decisions)
            replayed = captured(lambda steps=steps: steps("sparse"), device)
            with packed.used():
                found: Any = replayed()  # as timed
            conditions["sparse", fraction] = replayed
            traces[fraction] = [trace for _, trace in found]
            hard = _Steps(model, start, tokens, decisions)("hard")
            right = hard if exact is model else _Steps(exact, start, tokens, decisions)("hard")
            for (logits, trace), (library, _), (wanted, reference) in zip(found, hard, right, strict=True):
                check_equal(logits, library, wanted, same_decisions=bool((trace.work == reference.work).all()))
            progress.advance()
    conditions |= baselines
    rounds = WARM_UP + REPEATS[device.type]
    with Progress(f"{title}: timing", rounds, unit="rounds") as progress, packed.used():
        spent = interleaved(conditions, REPEATS[device.type], device, graphs=True, progress=progress)
    times = {key: [value / STEPS for value in quartiles(values)] for key, values in spent.items()}
    best = min(baselines, key=lambda key: times[key][0])
    rows = []
    for fraction in cases:
        own, dense = times["sparse", fraction], times[best]
        read, whole = _bytes(model, traces[fraction], context)
        totals = [trace.totals() for trace in traces[fraction]]
        speedup, ceiling = dense[0] / own[0], whole / read
        rows.append({
            "asked": fraction,
            "execution": "sparse",
            "active_fraction": sum(total.active_fraction for total in totals) / len(totals),
            "batch": batch,
            "context": context,
            "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
            "best_dense": best[0],
            "dense_ms": dense,
            "sparse_ms": own,
            "all_dense_ms": {key[0]: times[key][0] for key in baselines},
            "tokens_per_s": 1000 * batch / own[0],
            "dense_tokens_per_s": 1000 * batch / dense[0],
            "bytes": read,
            "dense_bytes": whole,
            "ceiling": ceiling,
            "speedup": speedup,
            "efficiency": (speedup - 1) / (ceiling - 1) if ceiling > 1 else None,
        })  # fmt: skip
    return rows


def _dense_conditions(
    dense: LanguageModel, batch: int, context: int, tokens: Tensor
) -> dict[tuple[str, float | None], Callable[[], object]]:
    """The model without routers in every form that might be the fastest, for the same number of steps."""
    device = tokens.device

    def steps(static: StaticDense) -> Callable[[], object]:
        return captured(lambda: [static.step(step) for step in tokens], device)

    torch.compiler.reset()  # otherwise code compiled for an earlier shape is generalised, which is slower
    found: dict[tuple[str, float | None], Callable[[], object]] = {
        ("dense", None): steps(StaticDense(dense, batch, context)),
        ("compiled dense", None): steps(StaticDense(dense, batch, context, lambda f: torch.compile(f, dynamic=False))),
    }
    if tokens.is_cuda:
        own = _Steps(dense, _noise(dense, batch, context), tokens, [None] * STEPS)
        found["own kernels at full activity", None] = captured(lambda: own("sparse"), device)
    return found


def _bytes(model: LanguageModel, traces: list[DepthTrace], context: int) -> tuple[float, float]:
    """Bytes of weights and cached keys and values that these steps read, and that a dense model reads.

    Without keys, a site's FLOPs are two per weight.
    """
    config, size = model.config, model.norm.weight.element_size()
    keys = 2 * config.kv_heads * config.width * context
    read = whole = 0.0
    sites = model.method.sites(keys=0)
    for trace in traces:
        work = trace.work.flatten(1)
        batch = work.shape[1]
        read += model.head_flops / 2
        whole += model.head_flops / 2
        for site, active in zip(sites, (work > 0).sum(1).tolist(), strict=True):
            read += (site.always + site.router + (site.active if active else 0)) / 2 + active * keys
            whole += (site.always + site.active) / 2 + batch * keys
    return read * size / len(traces), whole * size / len(traces)
