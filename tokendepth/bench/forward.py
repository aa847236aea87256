"""What skipping gives on the clock: the forward pass against the best dense run that a user could have had.

Before anything is timed, sparse must equal hard on the very decisions that will be timed. Conditions are interleaved,
so that drift hits all alike. Routers and compaction run inside the timed region. On a CPU hard and sparse are what
`compiled` makes of the model, and dense is the faster of eager and compiled, all with memory that is kept.

    efficiency = (speedup - 1) / (ceiling - 1)

where the ceiling is the ratio of FLOPs, dense over executed, counted from the trace.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokendepth import auto, data
from tokendepth.clock import captured, interleaved, quartiles
from tokendepth.compiled import compiled
from tokendepth.config import DenseConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.data.dataset import Split
from tokendepth.errors import UserError
from tokendepth.evaluate import batches, load_model
from tokendepth.machine import choose_device, environment
from tokendepth.methods import build
from tokendepth.model import LanguageModel, Output
from tokendepth.results import Row, add_rows
from tokendepth.runs import Run

FRACTIONS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.726, 0.8, 1.0)
REPEATS = {1: 40, 8: 12}
"""By batch; larger ones are repeated less often."""
FEWEST_REPEATS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference between sparse and hard logits, relative to the largest logit."""


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    batches: tuple[int, ...]


SHAPES = {
    "paper": Shape(ModelConfig(context=256, vocab_size=6064, dropout=0.0), (1, 8, 64)),
    "gpt2": Shape(ModelConfig(768, 12, 12, 3072, 1024, 0.0, 50304), (16,)),
    "d1024": Shape(ModelConfig(1024, 24, 16, 4096, 1024, 0.0, 50304), (8,)),
}
"""The paper's shape everywhere; the larger ones on a GPU, since they take minutes a pass elsewhere."""

Condition = Callable[[], Output]


def parse_fractions(text: str | None) -> tuple[float, ...]:
    if text is None:
        return FRACTIONS
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= fraction <= 1 for fraction in found):
        raise UserError(f"--fractions is {text!r}; expected numbers from 0 to 1 with commas between them: 0.25,0.4")
    return found


def in_words(row: Row) -> str:
    efficiency = "" if row["efficiency"] is None else f", efficiency {row['efficiency']:.2f}"
    return (
        f"{row['shape']}, batch {row['batch']}, active {row['active_fraction']:.3f}: {row['dense_ms'][0]:.2f} ms "
        f"{row['best_dense']}, {row['sparse_ms'][0]:.2f} ms sparse: {row['speedup']:.2f}x, at most "
        f"{row['ceiling']:.2f}x{efficiency}; auto runs {row['auto']}: {row['auto_over_hard']:.2f}x of the same weights "
        "run densely"
    )


def measure(device_name: str, results: Path, fractions: tuple[float, ...] = FRACTIONS) -> Iterator[Row]:
    """Rows of random decisions at each fraction, each written to results/forward.json as soon as it is known."""
    device = choose_device(device_name)
    for name in SHAPES if device.type == "cuda" else ("paper",):
        shape = SHAPES[name]
        adaptive = _built(shape.model, TSAConfig(), device)
        for batch in shape.batches:
            ids, draws = _random(shape.model, batch, len(adaptive.method.routers()), device)
            cases: dict[float | None, Tensor | None] = {fraction: draws < fraction for fraction in fractions}
            for row in _compared(adaptive, ids, cases):
                facts = {"benchmark": "forward", "shape": name, "positions": "random", "run": None}
                yield _written(results, {**facts, **row, **environment(device)})


def measure_run(path: Path, device_name: str, results: Path) -> Iterator[Row]:
    """Rows of a trained run that decides for itself, on its validation text."""
    run, device = Run.open(path), choose_device(device_name)
    model, dataset = _as_served(load_model(run, device)), data.load(run.config.data)
    run.check_corpus(dataset.fingerprint)
    split: Split = "val"
    text, _ = next(batches(dataset, split, run.config.model.context, device))
    for batch in SHAPES["paper"].batches:
        if batch > len(text):
            continue
        for row in _compared(model, text[:batch], {None: None}):
            facts = {"benchmark": "forward", "shape": run.name, "positions": "trained", "run": run.name}
            yield _written(results, {**facts, **row, **environment(device)})


def _written(results: Path, row: Row) -> Row:
    identity = ("benchmark", "shape", "positions", "batch", "asked", "dtype", "device")
    add_rows(results / "forward.json", [row], identity=identity)
    return row


def _built(model: ModelConfig, method: Any, device: torch.device) -> LanguageModel:
    return _as_served(build(RunConfig(model=model, method=method)).to(device).eval())


def _as_served(model: LanguageModel) -> LanguageModel:
    """In the precision that whoever wants speed would choose on its device."""
    return model.bfloat16() if model.norm.weight.is_cuda else model


def _fastest(model: LanguageModel) -> LanguageModel:
    """As it is on a GPU, where the passes are captured as graphs."""
    return model if model.norm.weight.is_cuda else compiled(model)


def _random(model: ModelConfig, batch: int, routers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens, and one number in [0, 1) per decision: active below the fraction, at scattered positions."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (batch, model.context), generator=dice)
    return ids.to(device), torch.rand(routers, batch, model.context, generator=dice).to(device)


@torch.no_grad()
def _compared(model: LanguageModel, ids: Tensor, cases: dict[float | None, Tensor | None]) -> list[Row]:
    """A row for each case of decisions (None: the model's own), all timed against each other."""
    torch.compiler.reset()  # a shape that was met before would make this one's code general, and slower
    dense, fast = _built(model.config, DenseConfig(), ids.device), _fastest(model)
    conditions: dict[tuple[str, float | None], Condition] = {("dense", None): lambda: dense(ids)}
    compiled_dense = torch.compile(dense, dynamic=False)
    conditions["compiled dense", None] = lambda: compiled_dense(ids)
    totals, choices = {}, {}
    for fraction, decisions in cases.items():

        def run(execution: Any, decisions: Tensor | None = decisions) -> Output:
            return fast(ids, execution=execution, decisions=decisions)

        _check_equal(run("sparse"), model(ids, execution="hard", decisions=decisions))
        totals[fraction] = run("sparse").trace.totals()
        choices[fraction] = auto.choose(fast, len(ids), ids.shape[1], totals[fraction].active_fraction)
        conditions["sparse", fraction] = lambda run=run: run("sparse")
        conditions["hard", fraction] = lambda run=run: run("hard")
    captures = {name: captured(condition, ids.device) for name, condition in conditions.items()}
    spent = interleaved(captures, REPEATS.get(len(ids), FEWEST_REPEATS), ids.device)
    times = {name: quartiles(values) for name, values in spent.items()}
    best, _ = min(("dense", None), ("compiled dense", None), key=lambda name: times[name][0])
    best_ms = times[best, None]
    rows = []
    for fraction, depth in totals.items():
        sparse, hard = times["sparse", fraction], times["hard", fraction]
        chosen = sparse if choices[fraction].execution == "sparse" else hard
        ceiling, speedup = depth.flops_dense / depth.flops, best_ms[0] / sparse[0]
        rows.append(
            {
                "asked": fraction,
                "active_fraction": depth.active_fraction,
                "batch": len(ids),
                "context": ids.shape[1],
                "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
                "best_dense": best,
                "dense_ms": best_ms,
                "hard_ms": hard,
                "sparse_ms": sparse,
                "flops_skipped": depth.flops_skipped,
                "tlops_skipped": depth.tlops_saved,
                "ceiling": ceiling,
                "speedup": speedup,
                "efficiency": (speedup - 1) / (ceiling - 1) if ceiling > 1 else None,
                "speedup_over_hard": hard[0] / sparse[0],
                "auto": choices[fraction].execution,
                "auto_over_hard": hard[0] / chosen[0],
                "auto_over_dense": best_ms[0] / chosen[0],
            }
        )
    return rows


def _check_equal(sparse: Output, hard: Output) -> None:
    """A time of something else than the reference says nothing."""
    largest = hard.logits.abs().max()
    error = float((sparse.logits - hard.logits).abs().max() / largest)
    same = bool((sparse.trace.work == hard.trace.work).all())
    if not same or not error <= TOLERANCE[hard.logits.dtype]:
        raise UserError(
            f"sparse differs from hard here by {error:.1e} of the largest logit, so nothing was timed; run: make test"
        )
