"""The time of a forward pass of what `depth` trained: the cost of a loss, relative to dense models with that loss.

Passes are on validation text, which changes from pass to pass, as does the number of tokens that take a span. Dense
models and word ends need no trained weights. All others decide with the routers in the run folder of their first seed;
if that is gone, decisions are random, with the share that the row has for each block, since the time does not depend on
which tokens they are. Skipping is checked against masking on every text before it is timed. All models take turns, so
that drift affects all of them. On a GPU a pass is one CUDA graph, or two if a span is packed, and its text is copied to
the graph's input.

    from paper.passes import passes
    passes(only=("budget", "mod"))          # nothing else may run on the device
"""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from paper.depth import PASSES, Entry, check_names, outcomes
from paper.equal_loss import DRAWN
from paper.grid import Progress as Done
from paper.grid import work_of
from paper.outcomes import Outcomes
from paper.spans import BASE, Scale, named, outcomes_at
from tokendepth import data
from tokendepth.bench.forward import as_served, check_equal
from tokendepth.config import DenseConfig, SpanConfig, to_dict
from tokendepth.errors import UserError
from tokendepth.infer.compile import compiled
from tokendepth.infer.packed import PackedPasses
from tokendepth.measure.clock import WARM_UP, captured, interleaved, quartiles
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import build
from tokendepth.model import LanguageModel, Output
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows
from tokendepth.runs.run import Run

BATCHES = (1, 8, 64)
REPEATS = {"cuda": 50, "cpu": 15}
TEXTS = 8
"""Batches of text, one after the other; each pass takes the next."""
Given = dict[str, Tensor]
"""The arguments of a pass: its text, and forced decisions."""
Pass = Callable[..., Output]


@dataclass(frozen=True)
class Timed:
    """One way to run the model of an entry."""

    entry: Entry
    how: str
    run: Pass
    given: list[Given]
    """For each text."""
    active_fraction: float = 1.0
    decided: str = "own"
    """Or DRAWN: random."""


def passes(
    *,
    only: tuple[str, ...] = (),
    batches: tuple[int, ...] = BATCHES,
    out: Path | None = None,
    scale: Scale = BASE,
    quick: bool = False,
    results: Path = Path("results"),
    device: str = "auto",
    show: bool = True,
) -> Done:
    """A row for every dense model and every contender in `only` at each batch size, at one scale.

    `out` holds the run folders; by default runs/depth, or runs/spans for another scale.
    """
    check_names(only)
    folder = out or Path("runs/depth" if scale == BASE else "runs/spans")
    where = choose_device(device)
    ran, found = outcomes(results, quick=quick) if scale == BASE else outcomes_at(results, scale, quick=quick)
    dense = [entry for entry in found if entry.setting.method == "dense"]
    routed = [entry for entry in found if entry.setting.method in only]
    if missing := next((name for name in only if name not in {entry.setting.method for entry in routed}), None):
        raise UserError(f"--only has {missing!r}: it is not part of {scale.title}, or not searched to the end")
    if not dense:
        raise UserError(f"{results} has no complete search yet; run: python -m paper search")
    dataset, context = data.load(dense[0].config.data), dense[0].config.model.context
    spellings = dataset.tokenizer.spellings()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)  # each model counts
    with Progress("passes", len(batches), unit="batch sizes", show=show) as progress:
        for batch in batches:
            torch.compiler.reset()  # otherwise code for an earlier shape is generalised, and slower
            windows = itertools.islice(dataset.windows("val", context, batch), TEXTS)
            texts = [torch.from_numpy(text).to(where) for text, _ in windows if len(text) == batch]
            ways: list[Timed] = []
            for entry in [*routed, *dense]:
                trained = None if _decides_untrained(entry) else _trained(entry, scale, folder)
                model = trained or _untrained(entry, spellings)
                drawn = None if trained or _decides_untrained(entry) else _drawn(model, entry, ran, texts[0])
                ways += _checked(entry, model, texts, drawn)
            rows = _timed(ways, batch, where)
            add_rows(results / PASSES, rows, identity=("config", "batch", "device"))
            progress.advance()
    return Done({}, [])


@torch.no_grad()
def _checked(entry: Entry, exact: LanguageModel, texts: list[Tensor], drawn: Tensor | None) -> list[Timed]:
    """The ways to run an entry's model on `texts`; unless `drawn`, decisions are those of the model in float32.

    They are forced in every way, except for word ends, which are the same in any precision.
    """
    exact = exact.to(texts[0].device)
    model, given, fractions = as_served(copy.deepcopy(exact)), list[Given](), list[float]()
    routed = [site.routed for site in exact.method.sites(keys=1)]
    ways = _ways(model, "sparse" if any(routed) else "hard")
    for text in texts if any(routed) else ():
        decisions = exact(text, execution="hard", decisions=drawn).trace.work[routed] > 0.5
        hard, wanted = (one(text, execution="hard", decisions=decisions) for one in (model, exact))
        given.append({"ids": text} | ({} if _decides_untrained(entry) else model.forcing(decisions)))
        fractions.append(wanted.trace.totals().active_fraction)
        for run in ways.values():
            found = run(**given[-1])
            same = bool((found.trace.work == wanted.trace.work).all())
            check_equal(found.logits, hard.logits, wanted.logits, same_decisions=same)
    decided, active = "own" if drawn is None else DRAWN, mean(fractions or [1.0])
    return [Timed(entry, how, run, given or [{"ids": t} for t in texts], active, decided) for how, run in ways.items()]


def _trained(entry: Entry, scale: Scale, out: Path) -> LanguageModel | None:
    """The model of the first seed, if its run exists and is finished."""
    name = next(iter(entry.runs(1)))
    run = Run(out / (name if scale == BASE else named(scale.title, name)))
    return load_model(Run.open(run.path), torch.device("cpu")) if run.finished else None


def _untrained(entry: Entry, spellings: Sequence[bytes]) -> LanguageModel:
    shape = replace(entry.config.model, vocab_size=len(spellings))
    return build(replace(entry.config, model=shape), spellings).eval()


def _decides_untrained(entry: Entry) -> bool:
    method = entry.config.method
    return method == DenseConfig() or (isinstance(method, SpanConfig) and method.decide == "rule")


def _drawn(model: LanguageModel, entry: Entry, ran: Outcomes, ids: Tensor) -> Tensor:
    """`[routed site, batch, time]`: random decisions with the share that the first seed had there on test text.

    One number is drawn per token, so that a token in a block with a small share is also in those with larger ones.
    """
    row = ran.first_row(entry.setting)
    if row is None or entry.setting.flops is not None:
        raise UserError(f"{entry.setting.title} has no run folder, and no row that says what it skips; train it first")
    sites = model.method.sites(keys=1)
    shares = row["evaluation"]["sparse"]["active_fraction_per_site"]
    draws = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    routed = [draws < share for site, share in zip(sites, shares, strict=True) if site.routed]
    return torch.stack(routed).to(ids.device)


def _ways(model: LanguageModel, execution: str) -> dict[str, Pass]:
    fast = compiled(model)
    ways: dict[str, Pass] = {"eager": functools.partial(model, execution=execution)}
    if execution == "sparse" and isinstance(fast, PackedPasses):
        ways["packed"] = functools.partial(fast, execution=execution)
        ways["compiled"] = functools.partial(fast.unpacked, execution=execution)
    else:
        ways["compiled"] = functools.partial(fast, execution=execution)
    return ways


def _one_after_the_other(way: Timed, device: torch.device, pool: Any) -> Callable[[], object]:
    """Each call is a pass over the next text."""
    texts = itertools.cycle(way.given)
    if way.how == "packed" or device.type != "cuda":
        return lambda: way.run(**next(texts))
    held = {name: part.clone() for name, part in way.given[0].items()}
    graph = captured(lambda: way.run(**held), device, pool=pool)

    def replayed() -> None:
        for name, part in next(texts).items():
            held[name].copy_(part)
        graph()

    return replayed


@torch.no_grad()
def _timed(ways: list[Timed], batch: int, device: torch.device) -> list[Row]:
    """A row for each entry, with its fastest way."""
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    with Progress(f"batch {batch}: compiling", len(ways), unit="ways") as progress:
        in_turns = {}
        for number, way in enumerate(ways):
            in_turns[number] = _one_after_the_other(way, device, pool)
            in_turns[number]()
            progress.advance()
    repeats = REPEATS[device.type]
    with Progress(f"batch {batch}: timing", WARM_UP + repeats, unit="rounds") as progress:
        spent = interleaved(in_turns, repeats, device, graphs=True, progress=progress)
    rows: dict[str, Row] = {}
    for number, way in enumerate(ways):
        title, times = way.entry.setting.title, quartiles(spent[number])
        if title not in rows or times[0] < rows[title]["pass_ms"][0]:
            facts = {"batch": batch, "pass_ms": times, "how": way.how, "active_fraction": way.active_fraction}
            facts["decided"] = way.decided
            rows[title] = {"name": title, "config": to_dict(work_of(way.entry.config)), **facts, **environment(device)}
    return list(rows.values())
