"""Commands for many runs, or for this machine."""

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
    """Train and evaluate a grid of runs, several at a time. Finished runs are kept: repeat the command until done.

    The grid consists of recipes with the values to vary, such as shakespeare.dense:model.n-layer=2,3,4
    """

    grid: tyro.conf.Positional[tuple[str, ...]]
    """Recipes, each followed by overrides: a colon before each override, commas between values."""
    seeds: int = 3
    """Number of seeds for each, counted from 0; use at least three."""
    workers: int | None = None
    """Runs at a time; by default 1 on a CPU, up to 8 on a GPU (one per two cores), and as many as fit on a cluster."""
    on: str = "local"
    """Where to train: local, ray:HOST:PORT, or ray for the cluster of this machine (docs/CLUSTER.md)."""
    curve: bool = False
    """Also evaluate budget-routed runs at budgets from 0.2 to 1, and early-exit runs at several thresholds."""
    out: Path = Path("runs/sweep")
    """Folder for the run folders."""
    results: Path | None = None
    """Also add the results to this file."""

    def __call__(self) -> None:
        share_cores()
        from rich.console import Console

        from tokendepth.recipes import variants
        from tokendepth.report import collect, terminal_table
        from tokendepth.runs.results import check_can_add
        from tokendepth.training.sweep import sweep

        if not self.grid:
            raise UserError(
                "sweep was given no recipes; expected at least one, as in: tokendepth sweep shakespeare.tsa"
            )
        if self.results:
            check_can_add(self.results)
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
"""The options of each benchmark, in addition to those that all take."""


@dataclass(frozen=True)
class Bench:
    """Time this machine: what skipping gains in forward passes, decoding, speculation and serving; cost of training."""

    what: tyro.conf.Positional[Literal["forward", "decode", "speculation", "training", "serve"]]
    """forward: forward passes with skipping, compared with dense ones. decode: the same token by token, with a cache.
    speculation: self-speculation of --run compared with plain decoding, in bfloat16 on a GPU, in float32 on a CPU.
    training: training steps of adaptive models, compared with dense ones. serve: a server for --run under load, with
    and without skipping, for one and for many requests at a time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""
    out: Path = Path("runs/bench")
    """Folder for the results, such as forward.json; a result replaces one that was measured the same way."""
    json: bool = False
    """Print one JSON object per line instead of words."""
    fractions: str | None = None
    """forward, decode: active fractions for random decisions, separated by commas."""
    batches: str | None = None
    """forward, decode: batch sizes, separated by commas."""
    shapes: str | None = None
    """forward, decode: model shapes, separated by commas: paper, gpt2 (d 768, 12 layers), d1024 (24 layers),
    smollm2 (d 576, 30 layers, Llama-style blocks)."""
    run: Path | None = None
    """Trained run to time; forward and decode then use its own decisions on validation text, not random ones."""
    corpus: str | None = None
    """forward --run, decode --run, speculation: a text other than the run's own, as text:PATH."""
    processes: int = 1
    """forward: measure in this many processes, one after the other, and keep the results of the median one."""
    clients: str | None = None
    """serve: numbers of simultaneous clients, separated by commas; by default 1,4,16."""
    against: str | None = None
    """serve: measure another OpenAI-compatible server on this machine instead, http://127.0.0.1:PORT."""
    server: str = "another server"
    """serve --against: its name in the results."""
    model: str | None = None
    """serve --against: name of its model; by default the first that it lists."""

    def __post_init__(self) -> None:
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        for name in dict.fromkeys(chain.from_iterable(OPTIONS_OF.values())):
            if name in given and name not in OPTIONS_OF[self.what]:
                owners = " and ".join(what for what, names in OPTIONS_OF.items() if name in names)
                raise UserError(f"--{name} is an option of bench {owners}, not of bench {self.what}; drop it")
        for name in ("fractions", "shapes"):
            if self.run and name in given:
                raise UserError(f"--{name} is for random decisions, and a run has its own; drop it, or --run")
        if "corpus" in given and not self.run:
            raise UserError("--corpus is a text for a run; name the run with --run, or drop --corpus")

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
