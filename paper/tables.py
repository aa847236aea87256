"""The TSA paper's tables: which runs each needs, what is measured for it, and which numbers are compared.

A run is written as for `sweep`, RECIPE:OPTION=VALUE, and shared by all tables that name it. If the paper's text and its
numbers, or its two frameworks, disagree about the set-up, both readings are run; the second with a third of the seeds.
"""

import re
from dataclasses import dataclass
from typing import Literal

from tokendepth.config import PAPER_THRESHOLDS, RunConfig, override
from tokendepth.errors import UserError, did_you_mean
from tokendepth.recipes import variants

Measurement = Literal["fractions", "batches", "training", "initialisation"]

DENSE = "shakespeare.dense"
TSA = "shakespeare.tsa-depth_penalty=0.001"
EARLY_EXIT = "shakespeare.early_exit"
BUDGET = "shakespeare.budget"
ENWIK8_DENSE, ENWIK8_TSA = "enwik8.dense", "enwik8.tsa"
PENALTIES = (0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5)
LAYERS = (5, 4, 3, 2)
UNIFORM = "-decay=all"
TEXT = "-source_length=10-steps=10000"
ROUTING = (TSA, "shakespeare.tsa-depth_penalty=0", "shakespeare.tsa-depth_penalty=0.05", ENWIK8_TSA)
"""The runs whose depth by token type is measured."""
SIZES = {"10M": (320, 7, 5), "30M": (512, 8, 8), "100M": (768, 13, 12)}
"""Width, layers and heads; with enwik8's vocabulary 10.6, 28.6 and 97 million parameters."""
SCALED = ("dense", "tsa", "budget")


def penalty(value: float, reading: str = "") -> str:
    return f"shakespeare.tsa-depth_penalty={value:g}{reading}"


def fewer(layers: int) -> str:
    return f"{DENSE}-n_layer={layers}"


def scaled(size: str, method: str) -> str:
    d_model, layers, heads = SIZES[size]
    shape = f"d_model={d_model}-n_layer={layers}-n_head={heads}-d_ff={4 * d_model}-steps=1500-eval_every=500"
    return f"enwik8.{method}-{shape}"


def _scaled_cell(size: str, method: str) -> str:
    d_model, layers, heads = SIZES[size]
    shape = f"model.d-model={d_model}:model.n-layer={layers}:model.n-head={heads}:model.d-ff={4 * d_model}"
    return f"enwik8.{method}:{shape}:train.steps=1500:train.eval-every=500"


_PENALTY_CELL = "shakespeare.tsa:method.depth-penalty=" + ",".join(f"{value:g}" for value in PENALTIES)
_DEFAULT_CELL = "shakespeare.tsa:method.depth-penalty=0.001"
_SYNTHETIC = tuple(f"synthetic.{task}_{method}" for task in ("copy", "sort") for method in ("dense", "tsa"))


@dataclass(frozen=True)
class Line:
    """A row of a published table, and the experiment that reproduces it."""

    table: str
    """Its name in paper/paper.json."""
    row: str
    label: str
    """The experiment: the name of its runs without the seed."""
    threshold: float | None = None
    """For early exit: the threshold of this row; one model is executed at several."""
    read_early: bool = False
    """For early exit: every token is computed to the end, and only its prediction is read at the exit."""


@dataclass(frozen=True)
class Table:
    title: str
    cells: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    """Cells of a second reading."""
    measurements: tuple[Measurement, ...] = ()
    lines: tuple[Line, ...] = ()
    second_lines: tuple[Line, ...] = ()
    about_second: str = ""
    in_all: bool = True
    seeds: int | None = None
    """A fixed number of seeds; None: as many as asked for."""
    tokens: int | None = None
    """Evaluate on that many tokens from the start of the validation text; None: on all of it."""


def _synthetic_lines(reading: str) -> tuple[Line, ...]:
    names = {"dense": "baseline", "tsa": "TSA"}
    return tuple(
        Line("synthetic", f"{task} {name}", f"synthetic.{task}_{method}{reading}")
        for task in ("copy", "sort")
        for method, name in names.items()
    )


def _penalty_lines(reading: str) -> tuple[Line, ...]:
    swept = tuple(Line("penalty", f"penalty {value:g}", penalty(value, reading)) for value in PENALTIES)
    return (Line("penalty", "baseline", DENSE + reading), *swept)


def _enwik8_lines(reading: str) -> tuple[Line, ...]:
    return (Line("enwik8", "baseline", ENWIK8_DENSE + reading), Line("enwik8", "TSA", ENWIK8_TSA + reading))


def _exit_lines(*, read_early: bool) -> tuple[Line, ...]:
    swept = {f"threshold {value:.2f}": value for value in PAPER_THRESHOLDS}
    return tuple(Line("early-exit", row, EARLY_EXIT, value, read_early) for row, value in swept.items())


TABLES: dict[str, Table] = {
    "synthetic": Table(
        "Copy and sort",
        _SYNTHETIC,
        tuple(f"{name}:data.source-length=10:train.steps=10000" for name in _SYNTHETIC),
        lines=_synthetic_lines(""),
        second_lines=_synthetic_lines(TEXT),
        about_second="The set-up in the paper's text: source length 10 and 10,000 steps. The table above uses the "
        "set-up that matches the printed numbers: length 20, batch 256, 400 steps, depth penalty 0.01.",
    ),
    "shakespeare": Table(
        "Tiny-Shakespeare",
        (DENSE, _DEFAULT_CELL, f"{DENSE}:model.n-layer={','.join(map(str, LAYERS))}"),
        measurements=("initialisation",),
        lines=(Line("shakespeare", "baseline", DENSE), Line("shakespeare", "TSA", TSA)),
    ),
    "enwik8": Table(
        "enwik8",
        (ENWIK8_DENSE, ENWIK8_TSA),
        (f"{ENWIK8_DENSE}:train.decay=all", f"{ENWIK8_TSA}:train.decay=all"),
        lines=_enwik8_lines(""),
        second_lines=_enwik8_lines(UNIFORM),
        about_second="Weight decay on every parameter, as in the paper's MLX implementation.",
    ),
    "penalty": Table(
        "The depth penalty",
        (DENSE, _PENALTY_CELL),
        (f"{DENSE}:train.decay=all", f"{_PENALTY_CELL}:train.decay=all"),
        lines=_penalty_lines(""),
        second_lines=_penalty_lines(UNIFORM),
        about_second="Weight decay on every parameter, as in the paper's MLX implementation.",
    ),
    "early-exit": Table(
        "Early exit",
        (DENSE, _DEFAULT_CELL, EARLY_EXIT),
        lines=(
            Line("matched", "baseline", DENSE),
            Line("matched", "TSA", TSA),
            Line("matched", "early exit", EARLY_EXIT, 0.75),
            *_exit_lines(read_early=False),
            Line("early-exit", "no exit taken", EARLY_EXIT, 1.0),
        ),
        second_lines=_exit_lines(read_early=True),
        about_second="Every token is computed to the end, and its prediction is read at the first exit that is "
        "confident enough. Nothing is skipped, and other tokens attend to a token that left as if it had stayed. The "
        "paper does not say which of the two it did.",
    ),
    "wall-clock": Table("Wall-clock over active fractions", measurements=("fractions",)),
    "batch": Table("Wall-clock over batch sizes", measurements=("batches",)),
    "training": Table("Training time", measurements=("training",)),
    "scaling": Table(
        "Scaling to 100M parameters",
        tuple(_scaled_cell(size, method) for size in SIZES for method in SCALED),
        in_all=False,
        seeds=1,
        tokens=2**20,
    ),
}


def chosen(name: str) -> list[Table]:
    """The tables selected by a name on the command line."""
    if name == "all":
        return [table for table in TABLES.values() if table.in_all]
    if name not in TABLES:
        raise UserError(f"{name!r}: no such table; {did_you_mean(name, ('all', *TABLES))}")
    return [TABLES[name]]


def runs(table: Table, seeds: int) -> dict[str, RunConfig]:
    """Every run of a table, by name."""
    found = {}
    for cells, count in ((table.cells, table.seeds or seeds), (table.second, max(1, seeds // 3))):
        for cell in cells:
            found |= variants(cell, count)
    return found


def label_of(name: str) -> str:
    """A run's name without its seed."""
    return re.sub(r"-seed\d+$", "", name)


def experiments() -> dict[str, RunConfig]:
    """Every experiment of every table, by label, and the budget model that the findings compare with."""
    tables = [*TABLES.values(), Table("", (BUDGET,))]
    return {label_of(name): config for table in tables for name, config in runs(table, 1).items()}


MINIATURE = {
    "model.d_model": "16", "model.d_ff": "32", "model.n_head": "2", "model.context": "48", "train.batch_size": "4",
    "train.lr": "0.01", "train.steps": "4", "train.eval_every": "4", "train.checkpoint_every": "2",
    "train.device": "cpu",
}  # fmt: skip
MINIATURE_TOKENS = 192


def miniature(config: RunConfig, layers: int = 3) -> RunConfig:
    """The same experiment, small enough to train on a CPU in a fraction of a second, without downloads."""
    changes = {**MINIATURE, "model.n_layer": str(min(config.model.n_layer, layers))}
    if config.data.corpus in ("shakespeare", "enwik8"):
        changes["data.corpus"] = "stdlib"
    return override(config, changes)
