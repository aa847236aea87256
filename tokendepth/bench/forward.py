"""Speedup of the forward pass with skipping, relative to the fastest dense pass available on the same machine.

Before anything is timed, sparse must equal hard for the same decisions that will be timed. Conditions are interleaved,
so that drift affects all equally. Routers and compaction run inside the timed region. The timed model is the one that
`compiled` returns, on a GPU as CUDA graphs. Dense is the fastest of compiled, eager and our own kernels with every
token active.

    efficiency = (speedup - 1) / (ceiling - 1)

The ceiling is the ratio of FLOPs, dense over executed, counted from the trace.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokendepth.config import DenseConfig, ModelConfig, RunConfig, TSAConfig, method_name
from tokendepth.context import Rows
from tokendepth.data import Dataset
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.infer import auto
from tokendepth.infer.compile import compiled
from tokendepth.infer.packed import PackedPasses, by_itself
from tokendepth.measure import calibrate
from tokendepth.measure.clock import WARM_UP, captured, interleaved, quartiles
from tokendepth.measure.evaluate import batches, load_model
from tokendepth.methods import build, dial_of
from tokendepth.model import Block, LanguageModel, Output
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows
from tokendepth.runs.run import Run
from tokendepth.trace import DepthTotals

FRACTIONS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.726, 0.8, 1.0)
BUDGETS = (0.7, 0.5, 0.4, 0.25)
"""The budgets at which a trained run with a dial is timed."""
REPEATS = {1: 100, 8: 30}
"""On a CPU: largest batch size, and how often it is repeated."""
FEWEST_REPEATS = 5
MOST_SECONDS = 180
"""Limit for timing on a CPU, where a pass of a real model takes seconds."""
GPU_REPEATS = 20
ROUNDING = 1e-5
"""Tolerance for logits in float32, relative to the largest."""


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    batches: tuple[int, ...]


SMOLLM2 = ModelConfig(
    576, 30, 9, 1536, 1024, 0.0, 49152, n_kv_head=3, norm="rms", positions="rotary", rope_base=1e5, ffn="swiglu",
    ffn_bias=False,
)  # fmt: skip
"""SmolLM2-135M."""
SHAPES = {
    "paper": Shape(ModelConfig(context=256, vocab_size=6064, dropout=0.0), (1, 8, 64)),
    "gpt2": Shape(ModelConfig(768, 12, 12, 3072, 1024, 0.0, 50304), (16,)),
    "d1024": Shape(ModelConfig(1024, 24, 16, 4096, 1024, 0.0, 50304), (8,)),
    "smollm2": Shape(SMOLLM2, (1, 8, 64)),
}
ON_A_CPU = ("paper",)
"""Default shapes; larger ones take minutes per pass there."""

Condition = Callable[[], object]


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


def parse_batches(text: str | None) -> tuple[int, ...] | None:
    """None: the batch sizes of each shape."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,5}", word) for word in words):
        raise UserError(f"--batches is {text!r}; expected whole numbers from 1 to 999999 with commas between: 1,8")
    return tuple(map(int, words))


def parse_shapes(text: str | None, known: Iterable[str]) -> tuple[str, ...] | None:
    """None: all shapes that the device can run."""
    names = None if text is None else tuple(word.strip() for word in text.split(","))
    if unknown := [name for name in names or () if name not in known]:
        raise UserError(f"--shapes names {unknown[0]!r}; expected some of {', '.join(known)} with commas between them")
    return names


def in_words(row: Row) -> str:
    efficiency = "" if row["efficiency"] is None else f", efficiency {row['efficiency']:.2f}"
    own = row[f"{row['execution']}_ms"][0]
    words = (
        f"{row['shape']}, batch {row['batch']}, active {row['active_fraction']:.3f}: {row['dense_ms'][0]:.2f} ms "
        f"{row['best_dense']}, {own:.2f} ms {row['execution']}: {row['speedup']:.2f}x, ceiling {row['ceiling']:.2f}x"
        f"{efficiency}"
    )
    if row["execution"] == "soft":
        return words
    return f"{words}; auto chooses {row['auto']}: {row['auto_over_hard']:.2f}x the speed of hard"


def measure(
    device_name: str,
    results: Path,
    fractions: tuple[float, ...] = FRACTIONS,
    batches: tuple[int, ...] | None = None,
    shapes: tuple[str, ...] | None = None,
) -> Iterator[Row]:
    """Rows for random decisions at each fraction, each written to `results`/forward.json as soon as it is known.

    `batches` replaces the batch sizes of every shape.
    """
    device = choose_device(device_name)
    names = shapes or (tuple(SHAPES) if device.type == "cuda" else ON_A_CPU)
    cells = [(name, batch) for name in names for batch in batches or SHAPES[name].batches]
    with Progress("bench forward", len(cells), unit="batch sizes") as progress:
        for name, batch in cells:
            model = SHAPES[name].model
            adaptive = built(model, TSAConfig(), device)
            ids, draws = _random(model, batch, len(adaptive.method.routers()), device)
            cases: dict[float | None, Tensor | None] = {fraction: draws < fraction for fraction in fractions}
            for row in _compared(name, adaptive, ids, cases):
                facts = {"benchmark": "forward", "shape": name, "positions": "random", "run": None}
                yield write_row(results, {**facts, **row, **environment(device)})
            progress.advance()


def measure_run(
    path: Path,
    device_name: str,
    results: Path,
    batches_asked: tuple[int, ...] | None = None,
    corpus: str | None = None,
) -> Iterator[Row]:
    """Rows for a trained run whose own routers decide, on its validation text, together with its evaluated loss.

    A run with a dial is timed at several budgets. `corpus` is another text than the run's own.
    """
    run, device = Run.open(path), choose_device(device_name)
    if not run.evaluation:
        raise UserError(f"{path} is not evaluated; run: tokendepth evaluate {path} --curve")
    with Progress(f"reading {path} and its corpus"):
        dataset, trained = dataset_of(run, corpus), load_model(run, device)
    served = as_served(copy.deepcopy(trained))
    if device.type == "cuda" and not served.can_be_captured:
        raise UserError(
            f"{path} cannot be timed on a GPU, where a pass is one graph: expected a method that decides on "
            "the device, d_model a multiple of 64, d_ff of 16, heads of 16 numbers or more; take --device cpu"
        )
    evaluated = figures_of(run)
    text, sizes = sequences(run, dataset, device, batches_asked)
    with Progress(f"bench forward of {run.name}", len(sizes), unit="batch sizes") as progress:
        for batch in sizes:
            ids = text[:batch]
            cases = {budget: _decided(trained, ids, run, budget, dataset) for budget in evaluated}
            soft = trained.method.has_soft and cases.get(None) is not None and "soft" in evaluated[None]
            for row in _compared(run.name, served, ids, cases, soft=soft):
                facts = {"benchmark": "forward", "shape": run.name, "positions": "trained", "run": run.name}
                facts |= {
                    "checkpoint": run.fingerprint,
                    "method": method_name(run.config.method),
                    **evaluated[row["asked"]][row["execution"]],
                }
                yield write_row(results, {**facts, **row, **environment(device)})
            progress.advance()


def sequences(
    run: Run, dataset: Dataset, device: torch.device, asked: tuple[int, ...] | None
) -> tuple[Tensor, tuple[int, ...]]:
    """Validation text `[sequence, time]` and the batch sizes to time, by default up to that of an evaluation."""
    context = run.config.model.context
    evaluated = len(next(batches(dataset, "val", context, device))[0])
    sizes = asked or tuple(size for size in SHAPES["paper"].batches if size <= evaluated)
    text, _ = next(iter(dataset.windows("val", context, max(sizes))))
    if max(sizes) > len(text):
        raise UserError(
            f"--batches asks for {max(sizes)} sequences; the validation text of {run.path} has {len(text)} of its "
            f"context of {context}"
        )
    return torch.from_numpy(text).to(device), sizes


def figures_of(run: Run) -> dict[float | None, dict[str, Row]]:
    """Loss and skipped work on the whole validation text for each timed budget (None: the run's own)."""

    def figures(at: Row, execution: str) -> Row:
        skipped = {f"val_{name}": at[name] for name in ("tlops_skipped", "flops_skipped")}
        return {"val_loss": at[execution]["loss"], **(skipped if execution == "sparse" else {})}

    evaluation = run.evaluation or {}
    dial = dial_of(run.config)
    if dial and dial.calibrated and dial.trained:
        points = {point[dial.name]: point for point in evaluation["curve"]}
        if not set(BUDGETS) <= set(points):
            raise UserError(f"{run.path} has no curve over budgets; run: tokendepth evaluate {run.path} --curve")
        return {budget: {"sparse": figures(points[budget], "sparse")} for budget in BUDGETS}
    return {None: {e: figures(evaluation, e) for e in ("soft", "sparse") if evaluation.get(e)}}


@torch.no_grad()
def _decided(model: LanguageModel, ids: Tensor, run: Run, budget: float | None, dataset: Dataset) -> Tensor | None:
    """The run's decisions on this text, in the precision of its evaluation; None without routers."""
    if budget is not None:
        calibrate.set_budget(model, run, budget, dataset, show=True)
    trace = model(ids, execution="hard").trace
    routed = [site.routed for site in trace.sites]
    return trace.work[routed] > 0.5 if any(routed) else None


def write_row(results: Path, row: Row) -> Row:
    """Write to `results`/forward.json, replacing a row that was measured the same way."""
    identity = ("benchmark", "shape", "positions", "batch", "asked", "execution", "dtype", "device")
    add_rows(results / "forward.json", [row], identity=identity)
    return row


def built(model: ModelConfig, method: Any, device: torch.device) -> LanguageModel:
    return as_served(build(RunConfig(model=model, method=method)).to(device).eval())


def as_served(model: LanguageModel) -> LanguageModel:
    """The model in the fastest precision of its device."""
    return model.bfloat16() if model.norm.weight.is_cuda else model


def in_float32(model: LanguageModel) -> LanguageModel:
    return model if model.norm.weight.dtype == torch.float32 else copy.deepcopy(model).float()


def _random(model: ModelConfig, batch: int, routers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens, and one random number in [0, 1) per decision: a token is active if it is below the fraction."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (batch, model.context), generator=dice)
    return ids.to(device), torch.rand(routers, batch, model.context, generator=dice).to(device)


@torch.no_grad()
def _compared(
    name: str, model: LanguageModel, ids: Tensor, cases: dict[float | None, Tensor | None], *, soft: bool = False
) -> list[Row]:
    """A row for each set of decisions (None: no routers), all timed against each other.

    `soft` adds a row for the same weights with soft gates, where nothing is skipped.
    """
    torch.compiler.reset()  # otherwise code compiled for an earlier shape is generalised, which is slower
    fast = compiled(model)
    conditions: dict[tuple[str, float | None], Condition] = _dense_conditions(model.config, ids)
    baselines = list(conditions)
    totals, choices, first = {}, {}, next(iter(cases))
    exact = in_float32(model)
    title = f"{name}, batch {len(ids)}"
    with Progress(f"{title}: compiling and checking", len(cases), unit="fractions") as progress:
        for fraction, decisions in cases.items():
            forced, own = {} if decisions is None else model.forcing(decisions), by_itself(fast)

            def run(execution: Any, own: LanguageModel = own, forced: dict[str, Tensor] = forced) -> Output:
                return own(ids, execution=execution, **forced)

            found, hard = run("sparse"), model(ids, execution="hard", decisions=decisions)
            wanted = hard if exact is model else exact(ids, execution="hard", decisions=decisions)
            same = bool((found.trace.work == wanted.trace.work).all())
            check_equal(found.logits, hard.logits, wanted.logits, same_decisions=same)
            del found, hard, wanted  # logits can be gigabytes
            totals["sparse", fraction] = run("sparse").trace.totals()
            choices[fraction] = auto.choose(
                fast, len(ids), ids.shape[1], totals["sparse", fraction].active_fraction, remembered=fraction != first
            )
            conditions["sparse", fraction] = lambda run=run: run("sparse")
            conditions["hard", fraction] = lambda run=run: run("hard")
            progress.advance()
    if soft:
        conditions["soft", None] = lambda: fast(ids, execution="soft")
        totals["soft", None] = _nothing_skipped(model, ids)
    # The outputs of timed passes are not read, so all can share memory: logits can be gigabytes.
    pool = torch.cuda.graph_pool_handle() if ids.is_cuda else None
    whole = {name for name in conditions if name[0] == "sparse" and isinstance(fast, PackedPasses)}
    captures = {
        name: condition if name in whole else captured(condition, ids.device, pool=pool)
        for name, condition in conditions.items()
    }
    on_a_cpu = next((REPEATS[batch] for batch in sorted(REPEATS) if batch >= len(ids)), FEWEST_REPEATS)
    repeats = GPU_REPEATS if ids.is_cuda else min(on_a_cpu, _affordable(captures, ids.device))
    with Progress(f"{title}: timing", WARM_UP + repeats, unit="rounds") as progress:
        spent = interleaved(captures, repeats, ids.device, graphs=True, progress=progress)
    times = {name: quartiles(values) for name, values in spent.items()}
    best = min(baselines, key=lambda name: times[name][0])
    rows = []
    for (execution, fraction), depth in totals.items():
        own, best_ms = times[execution, fraction], times[best]
        ceiling, speedup = depth.flops_dense / depth.flops, best_ms[0] / own[0]
        row = {
            "asked": fraction,
            "execution": execution,
            "active_fraction": depth.active_fraction,
            "batch": len(ids),
            "context": ids.shape[1],
            "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
            "best_dense": best[0],
            "dense_ms": best_ms,
            f"{execution}_ms": own,
            "flops_skipped": depth.flops_skipped,
            "tlops_skipped": depth.tlops_saved,
            "ceiling": ceiling,
            "speedup": speedup,
            "efficiency": (speedup - 1) / (ceiling - 1) if ceiling > 1 else None,
        }
        if execution == "sparse":
            hard = times["hard", fraction]
            chosen = own if choices[fraction].execution == "sparse" else hard
            row |= {"hard_ms": hard, "speedup_over_hard": hard[0] / own[0], "auto": choices[fraction].execution}
            row |= {"auto_over_hard": hard[0] / chosen[0], "auto_over_dense": best_ms[0] / chosen[0]}
        rows.append(row)
    return rows


def _affordable(conditions: dict[Any, Condition], device: torch.device) -> int:
    """How many rounds fit into `MOST_SECONDS`."""
    one = sum(sum(times) for times in interleaved(conditions, 1, device, warm_up=1).values())
    return max(FEWEST_REPEATS, int(1000 * MOST_SECONDS / one))


def _dense_conditions(config: ModelConfig, ids: Tensor) -> dict[tuple[str, float | None], Condition]:
    """The model without routers in every form that might be the fastest."""
    dense = built(config, DenseConfig(), ids.device)
    static = torch.compile(dense, dynamic=False)
    found: dict[tuple[str, float | None], Condition] = {
        ("dense", None): lambda: dense(ids),
        ("compiled dense", None): lambda: static(ids),
    }
    if ids.is_cuda:
        full = torch.compile(_at_full_activity, dynamic=False)
        found["own kernels at full activity", None] = lambda: full(dense, ids)
    else:
        packed = compiled(built(config, DenseConfig(), ids.device))
        found["compiled dense, packed", None] = lambda: packed(ids)
    return found


def _at_full_activity(dense: LanguageModel, ids: Tensor) -> Tensor:
    """A dense model run with the skipping kernels, every token active."""
    hidden, ctx = dense.entering(ids, "sparse")
    everyone = Rows(torch.ones_like(ids, dtype=torch.bool))
    for block in (module for module in dense.method.modules() if isinstance(module, Block)):
        # A launch-bound block uses its kernels without a list of tokens.
        hidden = block(hidden, ctx, None if block.launch_bound(hidden) else everyone)
    return dense.readout(hidden)


def _nothing_skipped(model: LanguageModel, ids: Tensor) -> DepthTotals:
    """The cost of soft gates: a token with weight 0.01 costs as much as one with weight 1."""
    trace = model(ids, execution="soft").trace
    return replace(trace, work=torch.ones_like(trace.work)).totals()


def check_equal(sparse: Tensor, library: Tensor, exact: Tensor, *, same_decisions: bool) -> None:
    """Raise UserError if the result is wrong, since its time would then mean nothing.

    Relative to `exact` (masking in float32), the error of skipping may be twice that of masking in the timed precision,
    or `ROUNDING` in float32.
    """
    error, usual = (float((one - exact).abs().max() / exact.abs().max()) for one in (sparse, library))
    if not same_decisions or not error <= max(2 * usual, ROUNDING):
        raise UserError(
            f"sparse differs from hard here by {error:.1e} of the largest logit, the library by {usual:.1e}, so "
            "nothing was timed; run: make test"
        )
