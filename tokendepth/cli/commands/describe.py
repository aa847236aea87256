"""Size and cost of a model, from a recipe or a run."""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from tokendepth.cli.commands.one import LOADING, Recipe, config_of
from tokendepth.config import RunConfig
from tokendepth.progress import Progress

SIZES = {
    "parameters": "parameters",
    "router_parameters": "router parameters",
    "flops_per_token": "FLOPs per token, nothing skipped",
    "flops_per_token_without_routers": "FLOPs per token, nothing skipped, no routers",
}


@dataclass(frozen=True)
class Describe:
    """Show parameters, FLOPs per token and memory of a recipe before training, or of a run: describe runs/mine."""

    recipe: Recipe
    json: bool = False
    """Print one JSON object instead of lines."""

    def __call__(self) -> None:
        _describe(config_of(self.recipe), as_json=self.json)


@dataclass(frozen=True)
class DescribeRun:
    """Show parameters, FLOPs per token and memory of a run."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    json: bool = False
    """Print one JSON object instead of lines."""

    def __call__(self) -> None:
        from tokendepth.runs.run import Run

        _describe(Run.open(self.run).config, as_json=self.json)


def _describe(config: RunConfig, *, as_json: bool) -> None:
    with Progress(LOADING):
        from tokendepth.measure.describe import describe

    with Progress(f"describing {config.recipe}"):  # a vocabulary may have to be read from a large corpus
        facts = describe(config)
    if as_json:
        print(json.dumps(facts))
        return
    sizes = {words: facts[name] for name, words in SIZES.items()}
    for words, value in (sizes | {name.replace("_", " "): size for name, size in facts["memory"].items()}).items():
        print(f"{words:<46} {value:>14,}")
