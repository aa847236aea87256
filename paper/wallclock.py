"""The TSA paper's wall-clock protocol: an untrained model, preset active tokens, 30 warm-up and 200 timed passes.

In the paper the first alpha * T positions of every sequence are active, and the others skip only the feed-forward
network. We also time random positions, which shorten no attention row, and skipping the whole block. Float32, eager.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokendepth.config import DenseConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.measure.clock import interleaved, quartiles
from tokendepth.methods import build
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows, rows_so_far
from tokendepth.trace import Execution

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.726, 0.8, 0.833, 0.9, 1.0)
BATCHES = (1, 8, 32, 64, 128)
ENWIK8_FRACTION = 0.833
ENWIK8_MODEL = ModelConfig(context=256, dropout=0.0, vocab_size=6064)
IDENTITY = ("benchmark", "shape", "batch", "condition", "active_fraction", "skip", "positions", "device")


@dataclass(frozen=True)
class Protocol:
    model: ModelConfig = ENWIK8_MODEL
    batch: int = 64
    fractions: tuple[float, ...] = FRACTIONS
    batches: tuple[int, ...] = BATCHES
    warm_up: int = 30
    passes: int = 200

    @property
    def shape(self) -> str:
        return f"d{self.model.d_model} L{self.model.n_layer} V{self.model.vocab_size}, T{self.model.context}"


@dataclass(frozen=True)
class Condition:
    """One line of a table: what runs, at which batch size."""

    batch: int
    name: str = "sparse"
    active_fraction: float | None = None
    skip: str | None = None
    positions: str | None = None

    @property
    def columns(self) -> Row:
        return {("condition" if key == "name" else key): value for key, value in vars(self).items()}


def fraction_sweep(protocol: Protocol) -> list[Condition]:
    return [Condition(protocol.batch, "soft"), *_sparse(protocol.batch, protocol.fractions)]


def batch_scaling(protocol: Protocol) -> list[Condition]:
    return [condition for batch in protocol.batches for condition in _sparse(batch, (ENWIK8_FRACTION,))]


def _sparse(batch: int, fractions: tuple[float, ...]) -> list[Condition]:
    ways = [(skip, positions) for skip in ("ffn", "block") for positions in ("contiguous", "random")]
    return [Condition(batch, "sparse", fraction, *way) for way in ways for fraction in fractions]


def measure(
    conditions: list[Condition],
    protocol: Protocol,
    results: Path,
    device: str = "auto",
    late: Callable[[], bool] = bool,
    show: bool = True,
) -> Iterator[Row]:
    """Yield the rows that results/wallclock.json lacks for this device; each is written at once.

    Every condition takes turns with the dense baseline. `late` is checked before each.
    """
    where, path = choose_device(device), results / "wallclock.json"
    facts = {"benchmark": "forward pass", "shape": protocol.shape, **environment(where)}
    known = {_identity(row) for row in rows_so_far(path)}
    abouts = [(condition, {**facts, **condition.columns}) for condition in conditions]
    todo = [(condition, about) for condition, about in abouts if _identity(about) not in known]
    rounds = len(todo) * (protocol.warm_up + protocol.passes)
    with Progress("timing forward passes", rounds, unit="rounds", show=show) as progress:
        for condition, about in todo:
            if late():
                return
            dense, ms = _time(condition, protocol, where, progress)
            times = {"dense_ms": quartiles(dense), "ms": quartiles(ms)}
            _, low, high = quartiles([d / m for d, m in zip(dense, ms, strict=True)])
            times |= {"speedup": times["dense_ms"][0] / times["ms"][0], "speedup_quartiles": [low, high]}
            row = {**about, **times, "passes": protocol.passes, "dtype": "float32"}
            add_rows(path, [row], identity=IDENTITY)
            yield row


def _identity(row: Row) -> tuple:
    return tuple(row.get(name) for name in IDENTITY)


@torch.no_grad()
def _time(
    condition: Condition, protocol: Protocol, device: torch.device, progress: Progress
) -> tuple[list[float], list[float]]:
    """Milliseconds per forward pass of the dense model and of the condition."""
    method = TSAConfig(skip="ffn" if condition.skip == "ffn" else "block")
    dense, model = (build(RunConfig(model=protocol.model, method=m)).to(device).eval() for m in (DenseConfig(), method))
    dice = torch.Generator().manual_seed(0)
    shape = (condition.batch, protocol.model.context)
    ids = torch.randint(protocol.model.vocab_size, shape, generator=dice).to(device)
    decisions = None if condition.active_fraction is None else _decisions(condition, protocol, dice).to(device)
    execution: Execution = "sparse" if condition.name == "sparse" else "soft"
    passes = {"dense": lambda: dense(ids), "own": lambda: model(ids, execution=execution, decisions=decisions)}
    times = interleaved(passes, protocol.passes, device, protocol.warm_up, progress=progress)
    return times["dense"], times["own"]


def _decisions(condition: Condition, protocol: Protocol, dice: torch.Generator) -> Tensor:
    """`[routed block, batch, time]`: equally many active tokens per sequence, the first ones or random ones."""
    routed, time_steps = protocol.model.n_layer - 1, protocol.model.context
    places = torch.arange(time_steps).expand(routed, condition.batch, time_steps)
    if condition.positions == "random":
        places = torch.rand(places.shape, generator=dice).argsort(-1)
    assert condition.active_fraction is not None
    return places < round(condition.active_fraction * time_steps)
