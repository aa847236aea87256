"""The paper's wall-clock protocol: an untrained model, tokens made active by decree, 30 warm-up and 200 timed passes.

The paper makes the first alpha * T positions of every sequence active and skips their feed-forward only; beside it
stand random positions, which no attention row gets shorter by, and the whole block skipped. Float32, as written.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokendepth.clock import interleaved, quartiles
from tokendepth.config import DenseConfig, MethodConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.machine import choose_device, environment
from tokendepth.methods import build
from tokendepth.results import Row, add_rows, read_rows
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
    """One line of a table: what runs, on how many sequences at once."""

    batch: int
    name: str = "sparse"
    active_fraction: float | None = None
    skip: str | None = None
    positions: str | None = None


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
) -> Iterator[Row]:
    """Yield the rows that results/wallclock.json does not have of this device, each written as soon as it is known.

    The dense baseline is timed anew for each batch size of a call. `late` is asked before each condition.
    """
    where, path = choose_device(device), results / "wallclock.json"
    facts = {"benchmark": "forward pass", "shape": protocol.shape, **environment(where)}
    known = {_identity(row) for row in read_rows(path)} if path.exists() else set()
    dense: dict[int, list[float]] = {}
    for condition in conditions:
        about = {**facts, **vars(condition), "condition": condition.name}
        del about["name"]
        if _identity(about) in known:
            continue
        if late():
            return
        if condition.batch not in dense:
            dense[condition.batch] = _time(DenseConfig(), Condition(condition.batch, "dense"), protocol, where)
        method = TSAConfig(skip="ffn" if condition.skip == "ffn" else "block")
        ms, base = _time(method, condition, protocol, where), dense[condition.batch]
        row = {**about, "dense_ms": base, "ms": ms, "speedup": base[0] / ms[0], "passes": protocol.passes}
        add_rows(path, [row | {"dtype": "float32"}], identity=IDENTITY)
        yield row


def _identity(row: Row) -> tuple:
    return tuple(row.get(name) for name in IDENTITY)


@torch.no_grad()
def _time(method: MethodConfig, condition: Condition, protocol: Protocol, device: torch.device) -> list[float]:
    """Milliseconds of a pass: median and quartiles."""
    model = build(RunConfig(model=protocol.model, method=method)).to(device).eval()
    dice = torch.Generator().manual_seed(0)
    shape = (condition.batch, protocol.model.context)
    ids = torch.randint(protocol.model.vocab_size, shape, generator=dice).to(device)
    decisions = None if condition.active_fraction is None else _decisions(condition, protocol, dice).to(device)
    execution: Execution = "sparse" if condition.name == "sparse" else "soft"
    passes = {condition: lambda: model(ids, execution=execution, decisions=decisions)}
    return quartiles(interleaved(passes, protocol.passes, device, protocol.warm_up)[condition])


def _decisions(condition: Condition, protocol: Protocol, dice: torch.Generator) -> Tensor:
    """`[routed block, batch, time]`: as many active tokens in every sequence, the first ones or any."""
    routed, time_steps = protocol.model.n_layer - 1, protocol.model.context
    places = torch.arange(time_steps).expand(routed, condition.batch, time_steps)
    if condition.positions == "random":
        places = torch.rand(places.shape, generator=dice).argsort(-1)
    assert condition.active_fraction is not None
    return places < round(condition.active_fraction * time_steps)
