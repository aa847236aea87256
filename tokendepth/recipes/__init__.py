"""Recipes: functions that return a complete RunConfig, named `module.function`, such as `shakespeare.tsa`."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokendepth.config import RunConfig, override
from tokendepth.errors import UserError, did_you_mean
from tokendepth.recipes import demo, enwik8, enwik8_bytes, modern, shakespeare, synthetic

_FUNCTIONS: tuple[Callable[[], RunConfig], ...] = (
    demo.dense,
    demo.tsa,
    demo.budget,
    demo.span,
    shakespeare.dense,
    shakespeare.tsa,
    shakespeare.budget,
    shakespeare.itt,
    shakespeare.mor,
    shakespeare.act,
    shakespeare.switch,
    shakespeare.early_exit,
    shakespeare.mod,
    enwik8.dense,
    enwik8.tsa,
    enwik8.budget,
    enwik8.itt,
    enwik8.mor,
    enwik8.act,
    enwik8.switch,
    enwik8.early_exit,
    enwik8.mod,
    enwik8_bytes.dense,
    enwik8_bytes.span,
    enwik8_bytes.learned_span,
    synthetic.copy_dense,
    synthetic.copy_tsa,
    synthetic.copy_budget,
    synthetic.sort_dense,
    synthetic.sort_tsa,
    synthetic.sort_budget,
    modern.dense_10m,
    modern.budget_10m,
    modern.dense_50m,
    modern.budget_50m,
    modern.dense_124m,
    modern.budget_124m,
)
RECIPES = {f"{f.__module__.rsplit('.', 1)[1]}.{f.__name__}": f for f in _FUNCTIONS}

LARGEST_GRID = 10_000
"""Maximum number of runs of one recipe: more are probably a typo, or weeks of work better split into several sweeps."""


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the complete config of a recipe. `changes` overrides individual values by dotted name.

    >>> config = td.recipe("shakespeare.tsa", {"train.steps": 100, "method.depth_penalty": 0.05})
    >>> config.train.steps
    100
    """
    if name not in RECIPES:
        raise UserError(f"{name!r}: no such recipe; {did_you_mean(name, RECIPES)}")
    return override(replace(RECIPES[name](), recipe=name), changes or {})


def variants(text: str, seeds: int = 1) -> dict[str, RunConfig]:
    """Every config that `shakespeare.dense:model.n-layer=2,3` stands for, with `seeds` seeds each, by name."""
    name, *changes = re.split(r":(?=[^:=]+=)", text)  # a value may hold a colon
    choices = []
    for change in changes:
        key, equals, values = change.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(
                f"{change!r} in {text!r} is not an override; expected OPTION=VALUE,VALUE as in train.steps=100"
            )
        key = key.removeprefix("--").replace("-", "_")
        choices.append([(key, value) for value in values.split(",")])
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; expected 1 or more")
    if (size := seeds * math.prod(map(len, choices))) > LARGEST_GRID:
        raise UserError(
            f"{text!r} with {seeds:,} seeds is a grid of {size:,} runs; expected at most {LARGEST_GRID:,}; "
            "use fewer --seeds or values, or several sweeps"
        )
    found = {}
    for chosen in itertools.product(*choices):
        label = "-".join([name, *(f"{key.split('.')[-1]}={_plain(value)}" for key, value in chosen)])
        for seed in range(seeds):
            found[f"{label}-seed{seed}"] = override(recipe(name), {**dict(chosen), "train.seed": str(seed)})
    return found


def _plain(value: str) -> str:
    """A value as part of a folder's name; only the end of a long one, such as a path, is kept."""
    return re.sub(r"[^\w.+-]+", "-", value)[-40:].strip("-")


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (RECIPES[name].__doc__ or "").strip().splitlines()[0]
