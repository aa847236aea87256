"""Recipes: functions that return a complete RunConfig. A recipe is named as it is imported, `shakespeare.tsa`."""

from collections.abc import Callable
from dataclasses import replace

from tokendepth.config import RunConfig
from tokendepth.errors import UserError, did_you_mean
from tokendepth.recipes import demo, enwik8, shakespeare, synthetic

_FUNCTIONS: tuple[Callable[[], RunConfig], ...] = (
    demo.dense,
    demo.tsa,
    shakespeare.dense,
    shakespeare.tsa,
    enwik8.dense,
    enwik8.tsa,
    synthetic.copy_dense,
    synthetic.copy_tsa,
    synthetic.sort_dense,
    synthetic.sort_tsa,
)
RECIPES = {f"{f.__module__.rsplit('.', 1)[1]}.{f.__name__}": f for f in _FUNCTIONS}


def recipe(name: str) -> RunConfig:
    if name not in RECIPES:
        raise UserError(f"{name!r}: no such recipe; {did_you_mean(name, RECIPES)}")
    return replace(RECIPES[name](), recipe=name)


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (RECIPES[name].__doc__ or "").strip().splitlines()[0]
