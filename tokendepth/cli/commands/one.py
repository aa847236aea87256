"""Commands about one run: train it, measure it, look at it, use it."""

import dataclasses
import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

from tokendepth.config import RunConfig
from tokendepth.progress import Progress
from tokendepth.recipes import RECIPES, recipe, summary

PARTS = ("data", "model", "method", "train")
DEMO_TOKENS = 2**15
"""Of the validation text that the demo's models are executed on, so that it takes seconds."""
LOADING = "loading PyTorch"


def _recipe_choice(name: str) -> Any:
    """A recipe as a subcommand whose options are its config, with the recipe's values as defaults."""
    config = recipe(name)
    fields = [(part, type(getattr(config, part)), dataclasses.field(default=getattr(config, part))) for part in PARTS]
    choice = dataclasses.make_dataclass(name, fields, frozen=True)
    return Annotated[choice, tyro.conf.subcommand(name, description=summary(name), prefix_name=False)]


if TYPE_CHECKING:
    Recipe = Any  # a union that is made at run time is no type to a static checker
else:
    _CHOICES = Union[tuple(_recipe_choice(name) for name in RECIPES)]  # noqa: UP007
    Recipe = Annotated[_CHOICES, tyro.conf.arg(name="")]


def _config(chosen: Any) -> RunConfig:
    return RunConfig(chosen.data, chosen.model, chosen.method, chosen.train, recipe=type(chosen).__name__)


@dataclass(frozen=True)
class Demo:
    """Train three small models on your CPU, dense, budget and TSA, execute them, and show what was really saved."""

    out: Path = Path("runs/demo")
    """Folder for the runs and the report. What is finished there is not repeated."""

    def __call__(self) -> None:
        from rich.console import Console

        from tokendepth.progress import Progress
        from tokendepth.report import build, sentences, terminal_table

        print("Three small models learn to write Python: about two minutes on two cores.", file=sys.stderr)
        with Progress("starting PyTorch"):
            from tokendepth.measure.evaluate import evaluate
            from tokendepth.training.loop import train
        runs = []
        for name in ("demo.dense", "demo.budget", "demo.tsa"):
            run = train(recipe(name), self.out / name, resume=True)
            if run.evaluation is None:
                with Progress(f"{name}: executing it on validation text, and timing it"):
                    run.write_evaluation(evaluate(run, device="cpu", tokens=DEMO_TOKENS))
            runs.append(run)
        with Progress("drawing the report"):
            page = build(runs, self.out / "report", title="tokendepth demo")
        Console().print(terminal_table(runs))
        for sentence in sentences(runs):
            print(f"\n{textwrap.fill(sentence, 100)}")
        print("\nSo short a training shows how it works, not which model is better; the README has results.")
        print(f"The report, with figures and a glossary: {page.resolve()}")


@dataclass(frozen=True)
class Train:
    """Train a recipe. Everything in it can be overridden: --train.steps 100 --method.depth-penalty 0.05."""

    recipe: Recipe
    out: Path | None = None
    """Run folder; by default runs/RECIPE-SEED."""
    resume: bool = False
    """Go on with the run in --out, or start it where there is none: repeat the same line until it is done."""

    def __call__(self) -> None:
        from tokendepth.progress import Progress

        with Progress("loading PyTorch"):
            from tokendepth.training.loop import train
        config = _config(self.recipe)
        out = self.out or Path("runs") / f"{config.recipe}-{config.train.seed}"
        run = train(config, out, resume=self.resume)
        if os.environ.get("RANK", "0") == "0":
            print(f"finished: {run.path}; measure it with: tokendepth evaluate {run.path}")


@dataclass(frozen=True)
class Evaluate:
    """Measure a finished run over a whole split under soft, hard and sparse execution, with its controls."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    split: Literal["val", "test"] = "val"
    """Which text; thresholds and weights have seen neither."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""
    timing: bool = True
    """Also time the forward pass against a router-free dense model."""
    budget: float | None = None
    """Execute a budget-routed run at this budget instead of its own; the result is printed, not kept in the run."""
    curve: bool = False
    """Also execute a budget-routed run at budgets from 0.2 to 1, one with exits at the paper's 13 thresholds."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from tokendepth.measure import calibrate
            from tokendepth.measure.evaluate import evaluate
        from tokendepth.report import terminal_table
        from tokendepth.runs.run import Run
        from tokendepth.training.progress import loss_in_words

        run = Run.open(self.run)
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("run", "json")}
        result = evaluate(run, **settings, show=True)
        kept = self.split == "val" and self.budget is None
        # Neither a full disk nor a stdout that nobody reads may swallow what took minutes to measure.
        try:
            if self.json:
                print(json.dumps(result, allow_nan=False))
            else:
                untouched = [name for name in ("untouched",) if name in result]
                for name in (*untouched, "soft", "hard", "sparse", *result["controls"]):
                    figures = result[name] if name in result else result["controls"][name]
                    loss = loss_in_words(figures["loss"], figures.get("bits_per_byte"))
                    words = f"{self.split} loss {loss}, active fraction {figures['active_fraction']:.3f}"
                    print(f"{name.replace('_', ' '):>21}: {words}")
                print(f"decisions that differ between hard and sparse: {result['decision_flips']}")
            if self.budget is not None:
                share = result["sparse"]["active_fraction"]
                if line := calibrate.off_budget(self.budget, share, result["tokens"]):
                    print(f"tokendepth: {line}", file=sys.stderr)
        finally:
            if kept:
                run.write_evaluation(result)
        if kept and not self.json:
            from rich.console import Console

            Console().print(terminal_table([run]))


@dataclass(frozen=True)
class Calibrate:
    """Find the thresholds at which a budget-routed run works on a given share of the tokens, and keep them in it."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    budget: float
    """Share of the tokens that are active in the routed blocks, above 0 and up to 1."""

    def __call__(self) -> None:
        with Progress(LOADING):
            import torch

            from tokendepth import data
            from tokendepth.measure import calibrate
            from tokendepth.measure.evaluate import load_model
        from tokendepth.runs.run import Run

        run = Run.open(self.run)
        calibrate.check(run, self.budget)
        with Progress(f"reading {run.path} and its corpus"):
            model, dataset = load_model(run, torch.device("cpu")), data.load(run.config.data)
        run.check_corpus(dataset.fingerprint)
        calibrate.calibrate(model, dataset, self.budget, show=True)
        calibrate.keep(model, run, self.budget)
        print(f"{run.path} can now be executed with --budget {self.budget:g}, on this machine and others")


@dataclass(frozen=True)
class Describe:
    """Parameters, FLOPs per token and memory of a recipe, before anything is trained."""

    recipe: Recipe
    json: bool = False
    """Print one JSON object instead of lines."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from tokendepth.measure.describe import describe

        config = _config(self.recipe)
        with Progress(f"describing {config.recipe}"):  # a vocabulary may have to be read from a large corpus
            facts = describe(config)
        if self.json:
            print(json.dumps(facts))
            return
        for name in ("parameters", "router_parameters", "flops_per_token", "flops_per_token_without_routers"):
            print(f"{name.replace('_', ' '):<34} {facts[name]:>14,}")
        for name, value in facts["memory"].items():
            print(f"{name.replace('_', ' '):<34} {value:>14,}")


@dataclass(frozen=True)
class Report:
    """Tables, figures and one HTML page from finished runs, without torch."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path = Path("report")
    """Folder for report.html, table.md, table.json and figures/."""
    title: str | None = None
    """Heading of the page."""
    results: Path | None = None
    """Also add these runs' figures, with device, versions and commit, to this results file."""

    def __call__(self) -> None:
        from tokendepth.report import build, collect
        from tokendepth.runs.run import Run

        runs = [Run.open(path) for path in self.runs]
        print(build(runs, self.out, title=self.title))
        if self.results:
            collect(runs, self.results)


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a finished run, and say what the tokens cost."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    prompt: str = ""
    """Text to continue; as much of its end as the context holds is read. Empty: the first token of the vocabulary."""
    tokens: int = 200
    """How many tokens to add."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    seed: int = 0
    """Fixes the sample."""
    execution: Literal["soft", "hard", "sparse"] = "sparse"
    """sparse skips work; hard is its dense reference; soft is the paper's training mode."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    budget: float | None = None
    """Execute a budget-routed run at this budget instead of its own."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from tokendepth.infer.generate import Spending, generate
        from tokendepth.runs.run import Run

        spending = Spending()
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("run", "prompt")}
        for number, piece in enumerate(generate(Run.open(self.run), self.prompt, spending, **settings)):
            print(piece if number else self.prompt + piece, end="", flush=True)
        print(f"\n[{self.execution}: {spending.summary()}]", file=sys.stderr)
        if self.budget is not None and (line := spending.off_budget(self.budget)):
            print(f"tokendepth: {line}", file=sys.stderr)


@dataclass(frozen=True)
class Doctor:
    """Check the installation: what works, what is missing, what to do about it."""

    def __call__(self) -> None:
        with Progress("examining the installation"):
            from tokendepth.cli.doctor import examine

            findings = examine()
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL" if finding.needed else "-   "
            print(f"{mark} {finding.name:<18} {finding.detail}")
        if any(finding.needed and not finding.ok for finding in findings):
            sys.exit(1)
