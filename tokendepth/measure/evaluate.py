"""Evaluate a finished run on a whole split: deterministic, in float32, in every execution mode, with controls."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import NO_CORPUS, DenseConfig, RunConfig, method_name
from tokendepth.data import Dataset
from tokendepth.data.dataset import NO_LOSS, HeldOut, Split
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.measure import calibrate
from tokendepth.measure.clock import interleaved, quartiles
from tokendepth.methods import build, dial_of
from tokendepth.methods.base import Dial, Method
from tokendepth.model import LanguageModel, Output
from tokendepth.progress import Progress
from tokendepth.runs.base import open_base
from tokendepth.runs.machine import choose_device, describe_device, environment
from tokendepth.runs.run import EVALUATION_VERSION, Run
from tokendepth.trace import EXECUTIONS, DepthTotals, Execution, add_up

Batch = tuple[Tensor, Tensor]

AT_ONCE, MOST_LOGITS = 2**14, 2**28
"""Tokens and logits per batch: with a vocabulary of 100,000, logits would fill the memory."""
LONGEST = 1024
"""Most tokens in the passage for heat maps and in a timed sequence; imported models may read 100,000."""


@dataclass(frozen=True)
class Measured:
    loss: float
    """Mean negative log likelihood per target, in nats."""
    accuracy: float
    targets: int
    depth: DepthTotals


def batches(
    dataset: Dataset, split: Split, context: int, device: torch.device, tokens: int | None = None
) -> Iterator[Batch]:
    """The whole split, or at least its first `tokens`, in batches that do not depend on how the model was trained."""
    seen = 0
    at_once = min(AT_ONCE, MOST_LOGITS // dataset.tokenizer.vocab_size, tokens or AT_ONCE)
    for inputs, targets in dataset.windows(split, context, max(1, at_once // context)):
        yield torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
        seen += inputs.size
        if tokens and seen >= tokens:
            return


@torch.no_grad()
def measure(model: LanguageModel, stream: Iterator[Batch], forward: Callable[[Tensor], Output]) -> Measured:
    """Run `forward` over the stream in evaluation mode; afterwards the model is back in its previous mode."""
    was_training = model.training
    model.eval()
    nats = hits = targets_seen = 0.0
    depth = []
    try:
        for inputs, targets in stream:
            out = forward(inputs)
            logits, flat = out.logits.flatten(0, 1).float(), targets.flatten()
            nats += F.cross_entropy(logits, flat, reduction="none").double().sum().item()
            hits += (logits.argmax(-1) == flat).sum().item()
            targets_seen += (flat != NO_LOSS).sum().item()
            depth.append(out.trace.totals())
    finally:
        model.train(was_training)
    return Measured(nats / targets_seen, hits / targets_seen, int(targets_seen), add_up(depth))


def load_model(run: Run, device: torch.device) -> LanguageModel:
    """The trained model of a finished run, in evaluation mode."""
    weights = {name: torch.from_numpy(array.copy()) for name, array in run.weights().items()}
    if bad := next((name for name, weight in weights.items() if weight.isnan().any()), None):
        raise UserError(f"{run.path / 'model.safetensors'}: its {bad} is not a number; restore the folder from a copy")
    model = build(run.config)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise UserError(
            f"{run.path / 'model.safetensors'} does not fit its config.json; restore the folder from a copy"
        ) from None
    return model.to(device).eval()


def evaluate(
    run: Run,
    *,
    split: HeldOut = "val",
    device: str = "auto",
    timing: bool = True,
    budget: float | None = None,
    curve: bool = False,
    tokens: int | None = None,
    corpus: str | None = None,
    show: bool = False,
) -> dict[str, Any]:
    """The content of `eval.json`. The caller writes it, so that evaluating does not change a run.

    `budget` evaluates a budget-routed run at another budget than its own; `curve` evaluates a run at every point of its
    dial: budgets, or exit thresholds. `tokens` takes only the beginning of the split. `corpus` is another text than the
    run's own. `show` prints progress.
    """
    with Progress(f"evaluating {run.path}", unit="tokens", show=show) as progress:
        return _evaluate(run, split, device, timing, budget, curve, tokens, corpus, progress)


def _evaluate(
    run: Run,
    split: HeldOut,
    device: str,
    timing: bool,
    budget: float | None,
    curve: bool,
    tokens: int | None,
    corpus: str | None,
    progress: Progress,
) -> dict[str, Any]:
    dial = dial_of(run.config)
    if budget is not None or (curve and dial is None):
        calibrate.check(run, budget or 1.0)
    if split not in ("val", "test"):
        raise UserError(f"split is {split!r}; expected val or test; set it with --split")
    if tokens is not None and tokens < 1:
        raise UserError(f"tokens is {tokens}; expected at least 1, or None for the whole split")
    config, where = run.config, choose_device(device)
    progress.update(note="reading the run and its corpus")
    dataset, model = dataset_of(run, corpus), load_model(run, where)
    if budget is not None:
        calibrate.set_budget(model, run, budget, dataset, show=progress.show)

    def stream(name: str) -> Iterator[Batch]:
        progress.update(note=name.replace("_", " "))
        for batch in batches(dataset, split, config.model.context, where, tokens):
            yield batch
            progress.advance(batch[0].numel())

    routers = model.method.routers()
    routed = any(site.routed for site in model.method.sites(keys=1))
    points = dial.points if curve and dial else ()
    length = sum(ids.numel() for ids, _ in batches(dataset, split, config.model.context, where, tokens))
    passes = (2 + model.method.has_soft if routed else 1) + len(_controls_of(model))
    passes += len(points) * (1 + len(model.method.point_controls))
    base = _base_of(run, where)
    passes += base is not None
    progress.update(total=passes * length)
    decided: dict[Execution, list[Tensor]] = {"hard": [], "sparse": []}

    def executed(execution: Execution) -> Measured:
        def forward(ids: Tensor) -> Output:
            out = model(ids, execution=execution)
            if execution in decided:
                decided[execution].append(out.trace.work > 0.5)
            return out

        return measure(model, stream(execution), forward)

    def point(dial: Dial, at: float) -> dict[str, Any]:
        name = f"sparse at {dial.name} {at:g}"
        progress.update(note=name)
        execute_at(model, run, at, dataset)
        found = measure(model, stream(name), lambda ids: model(ids, execution="sparse"))
        return {
            dial.name: at,
            "sparse": _figures(found, dataset, config, split),
            "tlops_skipped": found.depth.tlops_saved,
            "flops_skipped": found.depth.flops_skipped,
            "flops_per_token": found.depth.flops / found.depth.tokens,
            **_full_rows(found.depth),
            **point_controls(),
        }

    def point_controls() -> dict[str, Any]:
        """The same weights, executed differently, such as early exit with every token computed to the last block."""
        found: dict[str, Any] = {}
        for name, attributes in model.method.point_controls.items():
            with _overriding(model.method, attributes):
                control = measure(model, stream(name), lambda ids: model(ids, execution="hard"))
            found[name] = _figures(control, dataset, config, split)
            found[f"tlops_saved_{name}"] = control.depth.tlops_saved
        return found

    if routed:
        measured = {execution: executed(execution) for execution in ("hard", "sparse")}
        measured["soft"] = executed("soft") if model.method.has_soft else measured["hard"]
    else:  # without routers all three are the same computation
        measured = dict.fromkeys(EXECUTIONS, executed("sparse"))
    sparse = measured["sparse"].depth
    # Rounding can flip a decision at its threshold; the number of flips is part of the result.
    flips = sum(int((h != s).sum()) for h, s in zip(decided["hard"], decided["sparse"], strict=True)) if routed else 0
    return {
        "version": EVALUATION_VERSION,
        "method": method_name(config.method),
        "recipe": config.recipe,
        "corpus": corpus or config.data.corpus,
        "seed": config.train.seed,
        "split": split,
        "tokens": sparse.tokens,
        "routed": routed,
        "has_soft": model.method.has_soft,
        **({dial.name: budget or dial.own} if dial and dial.calibrated else {}),
        "parameters": sum(p.numel() for p in model.parameters()),
        "router_parameters": sum(p.numel() for router in routers for p in router.parameters()),
        **{name: _figures(measured[name], dataset, config, split) for name in EXECUTIONS},
        "tlops_saved_soft": measured["soft"].depth.tlops_saved,
        "tlops_skipped": sparse.tlops_saved,
        "flops_skipped": sparse.flops_skipped,
        "flops_per_token": sparse.flops / sparse.tokens,
        **_full_rows(sparse),
        "flops_per_token_dense": sparse.flops_dense / sparse.tokens,
        "decision_flips": flips,
        "controls": _controls(model, config, stream, measured["hard"].depth) if routers else {},
        **(_beside(base, sparse, stream("untouched model"), dataset, config, split) if base else {}),
        "time": time_forward(model, config, next(stream("timing"))[0]) if timing else None,
        "passage": _passage(model, dataset, split, where),
        "curve": [point(dial, at) for at in points if dial],
        "env": environment(where),
    }


def keeps(run: Run, split: Split, budget: float | None, tokens: int | None, corpus: str | None) -> bool:
    """Whether an evaluation is of the unchanged run on its own text and therefore kept in its folder."""
    own_text = corpus is None or run.config.data.corpus == NO_CORPUS
    return split == "val" and budget is None and tokens is None and own_text


def _base_of(run: Run, device: torch.device) -> LanguageModel | None:
    """The untouched model of a retrofit, if it still exists: a finished run does not need it."""
    if run.config.retrofit is None:
        return None
    try:
        return load_model(open_base(run.config.retrofit), device)
    except UserError:
        return None


def _beside(
    base: LanguageModel, depth: DepthTotals, stream: Iterator[Batch], dataset: Dataset, config: RunConfig, split: Split
) -> dict[str, Any]:
    """The loss of the untouched model of a retrofit on the same text, and the share of its block FLOPs executed."""
    untouched = measure(base, stream, base)
    blocks = [one.flops / one.tokens - base.head_flops for one in (depth, untouched.depth)]
    return {"untouched": _figures(untouched, dataset, config, split), "block_flops": blocks[0] / blocks[1]}


def has_curve(config: RunConfig) -> bool:
    """Whether a trained model of this config can run at several costs."""
    dial = dial_of(config)
    return dial is not None and dial.trained


def execute_at(model: LanguageModel, run: Run, at: float, dataset: Dataset) -> None:
    """Set the dial of a run's model: the budget, or the threshold above which tokens exit."""
    if calibrate.has_budget(run.config):
        calibrate.set_budget(model, run, at, dataset)
    else:
        model.method.set_point(at)


@contextmanager
def _overriding(method: Method, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Temporarily override attributes, for controls."""
    before = {name: getattr(method, name) for name in attributes}
    vars(method).update(attributes)
    try:
        yield
    finally:
        vars(method).update(before)


def _figures(measured: Measured, dataset: Dataset, config: RunConfig, split: Split) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "loss": measured.loss,
        "active_fraction": measured.depth.active_fraction,
        "active_fraction_per_site": measured.depth.per_site,
    }
    if config.data.synthetic:
        perplexity = math.exp(measured.loss) if measured.loss < 700 else None  # too large for a float
        return {**figures, "accuracy": measured.accuracy, "perplexity": perplexity}
    bits = measured.loss / math.log(2)
    by_character = config.data.tokens == "char"
    return {
        **figures,
        "bits_per_character": bits if by_character else None,
        "bits_per_byte": bits / dataset.bytes_per_token(split, measured.targets),
    }


def _full_rows(depth: DepthTotals) -> dict[str, float]:
    """FLOPs in the other convention, for methods that pack tokens: attention counted over the full context."""
    return {"flops_per_token_full_rows": depth.flops_full_rows / depth.tokens} if depth.narrower_rows else {}


def _controls_of(model: LanguageModel) -> list[str]:
    """Controls that show whether the router matters: random decisions, the method's own, and untrained routers."""
    routers = model.method.routers()
    if not routers:
        return []
    names = ["random_decisions_hard", *model.method.controls]
    if any(len(list(router.parameters())) for router in routers):  # otherwise there are no weights to reset
        names += ["untrained_router_soft", "untrained_router_hard"]
    return names


def _controls(
    model: LanguageModel, config: RunConfig, stream: Callable[[str], Iterator[Batch]], hard: DepthTotals
) -> dict[str, Any]:
    device = next(model.parameters()).device
    untrained = copy.deepcopy(model)
    for router, fresh in zip(untrained.method.routers(), build(config).method.routers(), strict=True):
        router.load_state_dict(fresh.state_dict())
    dice = torch.Generator().manual_seed(0)
    fractions = torch.tensor([f for f, routed in zip(hard.per_site, hard.routed, strict=True) if routed])

    def at_random(ids: Tensor) -> Output:
        decisions = torch.rand(len(fractions), *ids.shape, generator=dice) < fractions[:, None, None]
        return model(ids, execution="hard", decisions=decisions.to(device))

    conditions: dict[str, tuple[LanguageModel, Callable[[Tensor], Output]]] = {
        "random_decisions_hard": (model, at_random),
        "untrained_router_soft": (untrained, lambda ids: untrained(ids, execution="soft")),
        "untrained_router_hard": (untrained, lambda ids: untrained(ids, execution="hard")),
    }
    found = {}
    for name in _controls_of(model):
        own, forward = conditions.get(name, (model, lambda ids: model(ids, execution="hard")))
        with _overriding(model.method, model.method.controls.get(name, {})):
            measured = measure(own, stream(name), forward)
        found[name] = {"loss": measured.loss, "active_fraction": measured.depth.active_fraction}
    return found


@torch.no_grad()
def time_forward(model: LanguageModel, config: RunConfig, ids: Tensor, *, batch: int = 8, repeats: int = 15) -> dict:
    """Milliseconds per forward pass: dense without routers, hard and sparse, interleaved against drift."""
    ids = ids[:batch, :LONGEST]
    dense = build(replace(config, method=DenseConfig())).to(ids.device).eval()
    conditions = {
        "dense_ms": lambda: dense(ids),
        "hard_ms": lambda: model(ids, execution="hard"),
        "sparse_ms": lambda: model(ids, execution="sparse"),
    }
    spread = {name: quartiles(values) for name, values in interleaved(conditions, repeats, ids.device).items()}
    speedup = spread["dense_ms"][0] / spread["sparse_ms"][0]
    where = {"device": describe_device(ids.device), "batch": len(ids), "context": ids.shape[1], "dtype": "float32"}
    return {**where, **spread, "speedup": speedup}


@torch.no_grad()
def _passage(model: LanguageModel, dataset: Dataset, split: Split, device: torch.device) -> dict[str, Any]:
    """The decisions on the beginning of the split, token by token, for heat maps."""
    ids = torch.tensor(dataset.passage(split, min(model.config.context, LONGEST)), device=device)[None]
    hard = model(ids, execution="hard")
    soft = model(ids, execution="soft") if model.method.has_soft else hard
    nats = F.cross_entropy(soft.logits[0, :-1].float(), ids[0, 1:], reduction="none").tolist()
    routed = [n for n, site in enumerate(soft.trace.sites) if site.routed]
    return {
        "pieces": dataset.tokenizer.pieces(ids[0].tolist()),
        "sites": [soft.trace.sites[n].name for n in routed],
        "soft": [[round(w, 4) for w in soft.trace.work[n, 0].tolist()] for n in routed],
        "hard": [[int(w) for w in hard.trace.work[n, 0].tolist()] for n in routed],
        "surprisal": [None, *(round(n, 4) for n in nats)],
    }
