"""Commands about many runs, or about this machine."""

import json
import sys
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Literal

import tyro

from tokendepth.cli.commands.one import LOADING
from tokendepth.cli.cores import share_cores
from tokendepth.errors import UserError
from tokendepth.progress import Progress


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate a grid of runs, several at once. Finished runs are not repeated: call it until all are done.

    A cell of the grid is a recipe and what to vary in it: shakespeare.dense:model.n-layer=2,3,4
    """

    grid: tyro.conf.Positional[tuple[str, ...]]
    """Recipes, each followed by its overrides: colons between overrides, commas between values."""
    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    workers: int | None = None
    """Runs at a time; by default 1 on a CPU, up to 8 on a GPU (one per two cores), on a cluster as many as fit."""
    on: str = "local"
    """Where to train: local, ray:HOST:PORT, or ray for the cluster of this machine; see docs/CLUSTER.md."""
    curve: bool = False
    """Also execute budget-routed runs at budgets from 0.2 to 1, and early-exit runs at several thresholds."""
    out: Path = Path("runs/sweep")
    """Folder for the run folders."""
    results: Path | None = None
    """Also add the runs' figures to this results file."""

    def __call__(self) -> None:
        share_cores()
        from rich.console import Console

        from tokendepth.recipes import variants
        from tokendepth.report import collect, terminal_table
        from tokendepth.runs.results import rows_so_far
        from tokendepth.training.sweep import sweep

        if not self.grid:
            raise UserError(
                "sweep was given no recipes; expected at least one, as in: tokendepth sweep shakespeare.tsa"
            )
        if self.results:
            rows_so_far(self.results)  # a file that cannot be added to is refused before hours of training
        configs = {}
        for cell in self.grid:
            configs |= variants(cell, self.seeds)
        outcome = sweep(configs, self.out, on=self.on, workers=self.workers, curve=self.curve)
        if outcome.runs:
            Console().print(terminal_table(outcome.runs))
            if self.results:
                collect(outcome.runs, self.results)
        for name, words in outcome.failed.items():
            print(f"tokendepth: {name} failed: {words}", file=sys.stderr)
        if outcome.failed:
            sys.exit(1)


OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "forward": ("fractions", "batches", "shapes", "run", "corpus", "processes"),
    "decode": ("fractions", "batches", "shapes", "run", "corpus"),
    "speculation": ("run", "corpus"),
    "training": (),
    "serve": ("run", "clients", "against", "server", "model"),
}
"""What may be said of each benchmark, beside what all of them take."""


@dataclass(frozen=True)
class Bench:
    """Time this machine: what skipping gains in a pass, token by token, in drafts and in a server; training's cost."""

    what: tyro.conf.Positional[Literal["forward", "decode", "speculation", "training", "serve"]]
    """forward: passes that skip against dense ones. decode: the same token by token, with a cache. speculation: --run
    drafting for itself against plain decoding, in bfloat16 on a GPU, in float32 on a CPU. training: steps of adaptive
    models against dense ones. serve: a server of --run under load, skipping and dense, many requests at a time and
    one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""
    out: Path = Path("runs/bench")
    """Folder for the rows, such as forward.json; a row replaces one that was measured the same way."""
    json: bool = False
    """Print one JSON object a line instead of words."""
    fractions: str | None = None
    """forward, decode: active fractions of random decisions, separated by commas."""
    batches: str | None = None
    """forward, decode: batch sizes, separated by commas."""
    shapes: str | None = None
    """forward, decode: shapes of models, separated by commas: paper, gpt2 (d 768, 12 layers), d1024 (24 layers),
    smollm2 (d 576, 30 layers, modern blocks)."""
    run: Path | None = None
    """The trained run to time. forward, decode: with its own decisions on validation text, instead of random ones."""
    corpus: str | None = None
    """forward --run, decode --run, speculation: another text than the run's own, as text:PATH."""
    processes: int = 1
    """forward: measure in this many processes, one after the other, and keep the rows of the median one."""
    clients: str | None = None
    """serve: how many clients at once, separated by commas; by default 1,4,16."""
    against: str | None = None
    """serve: measure the server of the OpenAI API at this address of this machine instead, http://127.0.0.1:PORT."""
    server: str = "another server"
    """serve --against: what to call it in the rows."""
    model: str | None = None
    """serve --against: the name of its model; by default the first that it lists."""

    def __post_init__(self) -> None:
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        for name in dict.fromkeys(chain.from_iterable(OPTIONS_OF.values())):
            if name in given and name not in OPTIONS_OF[self.what]:
                owners = " and ".join(what for what, names in OPTIONS_OF.items() if name in names)
                raise UserError(f"--{name} is of bench {owners}, not of bench {self.what}; drop it")
        for name in ("fractions", "shapes"):
            if self.run and name in given:
                raise UserError(f"--{name} is of random decisions, and a run has its own; drop it, or --run")
        if "corpus" in given and not self.run:
            raise UserError("--corpus is a text for a run; name the run with --run, or drop it")

    def __call__(self) -> None:
        if self.what == "forward":
            self._forward()
            return
        if self.what == "decode":
            self._decode()
            return
        if self.what == "speculation":
            self._speculation()
            return
        if self.what == "serve":
            self._serve()
            return
        with Progress(LOADING):
            from tokendepth.bench import training
        for row in training.measure(self.device, self.out):
            print(json.dumps(row))

    def _decode(self) -> None:
        with Progress(LOADING):
            from tokendepth.bench import decode
        batches = decode.parse_batches(self.batches)
        fractions = decode.parse_fractions(self.fractions) if self.fractions else decode.FRACTIONS
        shapes = decode.parse_shapes(self.shapes)
        if self.run:
            rows = decode.measure_run(self.run, self.device, self.out, batches, self.corpus)
        else:
            rows = decode.measure(self.device, self.out, fractions, batches, shapes)
        for row in rows:
            print(json.dumps(row) if self.json else decode.in_words(row))

    def _speculation(self) -> None:
        with Progress(LOADING):
            from tokendepth.bench import speculation
        if self.run is None:
            raise UserError("bench speculation needs a trained run; name one with --run RUN")
        row = speculation.measure(self.run, self.device, self.out, self.corpus)
        print(json.dumps(row) if self.json else speculation.in_words(row))

    def _forward(self) -> None:
        with Progress(LOADING):
            from tokendepth.bench import forward, processes
        if not 1 <= self.processes <= 1000:
            raise UserError(f"--processes is {self.processes}; expected a number from 1 to 1000")
        fractions, batches = forward.parse_fractions(self.fractions), forward.parse_batches(self.batches)
        shapes = forward.parse_shapes(self.shapes, forward.SHAPES)
        if self.processes > 1:
            words = ["--device", self.device, *(["--batches", self.batches] if self.batches else [])]
            words += ["--shapes", self.shapes] if self.shapes else []
            words += ["--corpus", self.corpus] if self.corpus else []
            words += ["--run", str(self.run)] if self.run else ["--fractions", ",".join(map(str, fractions))]
            rows = processes.measure(words, self.processes, self.out)
        elif self.run:
            rows = forward.measure_run(self.run, self.device, self.out, batches, self.corpus)
        else:
            rows = forward.measure(self.device, self.out, fractions, batches, shapes)
        for row in rows:
            print(json.dumps(row) if self.json else forward.in_words(row))

    def _serve(self) -> None:
        with Progress(LOADING):
            from tokendepth.bench import serve
        clients = serve.parse_clients(self.clients)
        if (self.run is None) == (self.against is None):
            raise UserError("bench serve needs a trained run, --run RUN, or another server, --against URL; name one")
        if self.run:
            rows = serve.measure(self.run, self.device, self.out, clients)
        else:
            rows = serve.measure_other(str(self.against), self.server, self.model, self.device, self.out, clients)
        for row in rows:
            print(json.dumps(row) if self.json else serve.in_words(row))
