"""Commands for one run: train, evaluate, inspect and use it."""

import dataclasses
import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro

from tokendepth.cli.arguments import draft_share
from tokendepth.cli.cores import share_cores
from tokendepth.config import RunConfig
from tokendepth.errors import Interrupted, SweepStopped
from tokendepth.progress import Progress
from tokendepth.recipes import RECIPES, recipe, summary

PARTS = ("data", "model", "method", "train")
LOADING = "loading PyTorch"


def _recipe_choice(name: str) -> Any:
    """A recipe as a subcommand whose options are its config, with the recipe's values as defaults."""
    config = recipe(name)
    fields = [(part, type(getattr(config, part)), dataclasses.field(default=getattr(config, part))) for part in PARTS]
    choice = dataclasses.make_dataclass(name, fields, frozen=True)
    return Annotated[choice, tyro.conf.subcommand(name, description=summary(name), prefix_name=False)]


if TYPE_CHECKING:
    Recipe = Any  # a type checker does not accept a union made at run time
else:
    _CHOICES = Union[tuple(_recipe_choice(name) for name in RECIPES)]  # noqa: UP007
    Recipe = Annotated[_CHOICES, tyro.conf.arg(name="")]


def config_of(chosen: Any) -> RunConfig:
    return RunConfig(chosen.data, chosen.model, chosen.method, chosen.train, recipe=type(chosen).__name__)


@dataclass(frozen=True)
class Demo:
    """Train four small models on your CPU (dense, budget, span, TSA), run them with skipping, and write a report."""

    out: Path = Path("runs/demo")
    """Folder for the runs and the report. Finished runs are kept."""

    def __call__(self) -> None:
        share_cores()
        from rich.console import Console

        from tokendepth.progress import Progress
        from tokendepth.report import build, check_extra, sentences, terminal_table

        check_extra()
        print(
            "Training four small models on Python code: about two minutes on two idle cores.",
            file=sys.stderr,
        )
        with Progress("starting PyTorch"):
            from tokendepth.measure.evaluate import evaluate
            from tokendepth.training.loop import train
        runs = []
        for name in ("demo.dense", "demo.budget", "demo.span", "demo.tsa"):
            try:
                run = train(recipe(name), self.out / name, resume=True)
            except Interrupted as stop:  # a demo resumes without being asked to
                raise SweepStopped(stop.exit_code - 128, self.out) from None
            if run.evaluation is None:
                with Progress(f"{name}: evaluating and timing"):
                    run.write_evaluation(evaluate(run, device="cpu"))
            runs.append(run)
        with Progress("drawing the report"):
            page = build(runs, self.out / "report", title="tokendepth demo")
        Console().print(terminal_table(runs))
        for sentence in sentences(runs):
            print(f"\n{textwrap.fill(sentence, 100)}")
        print(
            "\nA training as short as this shows how it works, not which model is better. (Budget routing takes two "
            "forward passes per step.) The README has results."
        )
        print(f"Report with figures and a glossary: {page.resolve()}")


@dataclass(frozen=True)
class Train:
    """Train a recipe. Options override its values: --train.steps 100 --method.depth-penalty 0.05."""

    recipe: Recipe
    out: Path | None = None
    """Run folder; by default runs/RECIPE-SEED."""
    resume: bool = False
    """Continue the run in --out, or start it if there is none: repeat the same command until it is done."""

    def __call__(self) -> None:
        share_cores()
        with Progress(LOADING):
            from tokendepth.training.loop import train
        config = config_of(self.recipe)
        out = self.out or Path("runs") / f"{config.recipe}-{config.train.seed}"
        run = train(config, out, resume=self.resume)
        if os.environ.get("RANK", "0") == "0":
            print(f"finished: {run.path}; evaluate it with: tokendepth evaluate {run.path}")


@dataclass(frozen=True)
class Import:
    """Turn a Hugging Face model (Llama, Mistral, Qwen2, Qwen3, SmolLM2, first-generation Gemma) into a finished run."""

    model: tyro.conf.Positional[Path]
    """Folder with config.json, safetensors and tokenizer.json, or a GGUF file."""
    out: tyro.conf.Positional[Path]
    """New run folder."""
    corpus: str | None = None
    """Default text for evaluation, as text:PATH."""
    context: int | None = None
    """Longest sequence; by default the model's own context."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from tokendepth.importing.convert import import_model
        run = import_model(self.model, self.out, corpus=self.corpus, context=self.context, show=True)
        shape = run.config.model
        print(f"imported: {run.path} ({shape.n_layer} layers, width {shape.d_model}, context {shape.context})")
        print(f"generate text with: tokendepth generate {run.path} --prompt TEXT")


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a finished run on a whole split under soft, hard and sparse execution, with controls."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    split: Literal["val", "test"] = "val"
    """Which split to evaluate; neither was used for training or for thresholds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    timing: bool = True
    """Also time the forward pass against a router-free dense model."""
    budget: float | None = None
    """Run at this budget instead of the run's own; the result is printed but not saved in the run."""
    curve: bool = False
    """Also evaluate a budget-routed run at budgets from 0.2 to 1, or an early-exit run at several thresholds."""
    corpus: str | None = None
    """A text other than the run's own, as text:PATH; saved in the run only if that was imported without a text."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __call__(self) -> None:
        share_cores()
        with Progress(LOADING):
            from tokendepth.measure import calibrate
            from tokendepth.measure.evaluate import evaluate, keeps
        from tokendepth.report import terminal_table
        from tokendepth.runs.run import Run
        from tokendepth.training.progress import loss_in_words

        run = Run.open(self.run)
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("run", "json")}
        result = evaluate(run, **settings, show=True)
        kept = keeps(run, self.split, self.budget, None, self.corpus)
        # Results that took minutes must survive a full disk and a closed stdout.
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
    """Find the thresholds at which a budget-routed run processes a given share of tokens, and store them in the run."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    budget: float
    """Share of the tokens that are active in the routed blocks, above 0 and up to 1."""
    corpus: str | None = None
    """A text other than the run's own, as text:PATH."""

    def __call__(self) -> None:
        share_cores()
        with Progress(LOADING):
            import torch

            from tokendepth.data.of_run import dataset_of
            from tokendepth.measure import calibrate
            from tokendepth.measure.evaluate import load_model
        from tokendepth.runs.run import Run

        run = Run.open(self.run)
        calibrate.check(run, self.budget)
        with Progress(f"reading {run.path} and its corpus"):
            dataset, model = dataset_of(run, self.corpus), load_model(run, torch.device("cpu"))
        calibrate.calibrate(model, dataset, self.budget, show=True)
        calibrate.keep(model, run, self.budget)
        print(f"{run.path} can now be run with --budget {self.budget:g}, on this and other machines")


@dataclass(frozen=True)
class Report:
    """Write tables, figures and an HTML page from finished runs; needs no torch."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path = Path("report")
    """Folder for report.html, table.md, table.json and figures/."""
    title: str | None = None
    """Title of the page."""
    results: Path | None = None
    """Also add the results, with device, versions and commit, to this file."""

    def __call__(self) -> None:
        from tokendepth.report import build, collect
        from tokendepth.runs.results import check_can_add
        from tokendepth.runs.run import Run

        if self.results:
            check_can_add(self.results)
        runs = [Run.open(path) for path in self.runs]
        print(build(runs, self.out, title=self.title))
        if self.results:
            collect(runs, self.results)


@dataclass(frozen=True)
class Generate:
    """Generate text from a prompt with a finished run, and show what the tokens cost."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    prompt: str = ""
    """Text to continue; if it is longer than the context, only its end is read. Empty: start from token 0."""
    tokens: int = 200
    """Maximum number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0 always picks the most likely token."""
    top_k: int = 0
    """Sample only from this many most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Sample only tokens at least this probable, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occurred before become less likely."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Stop before this string; may be given several times."""
    seed: int = 0
    """Random seed for sampling."""
    execution: Literal["soft", "hard", "sparse"] = "sparse"
    """sparse really skips; hard decides the same but computes everything; soft uses gates as weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    budget: float | None = None
    """Run at this budget instead of the run's own."""
    speculate: str | None = None
    """Self-speculation: draft with most blocks skipped, verify several tokens in one pass. auto, or the share of tokens
    that a draft processes."""

    def __call__(self) -> None:
        share_cores()
        with Progress(LOADING):
            from tokendepth.infer.generate import generate
        from tokendepth.cli.shades import Shades
        from tokendepth.runs.run import Run

        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("run", "prompt")}
        settings["speculate"] = draft_share(self.speculate)
        (generation,) = generate(Run.open(self.run), [self.prompt], **settings)
        if generation.left_out:
            cause = "the prompt is longer than the context of this model"
            print(f"tokendepth: {cause}; its first {generation.left_out} tokens are ignored", file=sys.stderr)
        shades = Shades()
        if shades.on:
            print(shades.legend())
        print(self.prompt, end="", flush=True)
        for token in generation.tokens():
            print(shades.shaded(token.text, token.active_fraction), end="", flush=True)
        spending = generation.spending
        print(f"\n[{self.execution}: {spending.summary()}]", file=sys.stderr)
        if generation.speculation is not None:
            print(f"[speculation: {generation.speculation.summary()}]", file=sys.stderr)
        if self.budget is not None and (line := spending.off_budget(self.budget)):
            print(f"tokendepth: {line}", file=sys.stderr)


@dataclass(frozen=True)
class Export:
    """Write a finished run as a folder for Hugging Face transformers: weights, tokenizer, model card (docs/HF.md)."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: tyro.conf.Positional[Path]
    """Folder to write; an existing export is replaced, any other folder gives an error."""

    def __call__(self) -> None:
        from tokendepth.runs.run import Run

        run = Run.open(self.run)
        with Progress("loading PyTorch and transformers"):
            from tokendepth.hf.export import export
        with Progress(f"exporting {run.path}"):
            out = export(run, self.out)
        print(f"{out}: load it with AutoModelForCausalLM.from_pretrained after import tokendepth.hf")


@dataclass(frozen=True)
class Doctor:
    """Check the installation: what works, what is missing, and how to fix it."""

    def __call__(self) -> None:
        with Progress("checking the installation"):
            from tokendepth.cli.doctor import examine

            findings = examine()
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL" if finding.needed else "-   "
            print(f"{mark} {finding.name:<18} {finding.detail}")
        if any(finding.needed and not finding.ok for finding in findings):
            sys.exit(1)
