"""The schema of a run's JSON files: values of the wrong type or range are rejected.

A shape is a `Kind` of value, an `Object`, `[shape]` for a list, None for null, or a tuple of alternative shapes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokendepth.checks import printable

Shape = Any
ROUNDING = 1e-6
"""Tolerance for rounding: how far a share may exceed 1, or a loss fall below 0."""


@dataclass(frozen=True)
class Kind:
    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Object:
    needed: Mapping[str, Shape] = field(default_factory=dict)
    known: Mapping[str, Shape] = field(default_factory=dict)
    """Optional fields, which older versions did not write."""
    other: Shape = ()
    """Shape of fields with any other name."""


def problem(value: Any, shape: Shape, name: str = "") -> str | None:
    """What is wrong with the field `name` (empty: the whole file), as the end of an error message; None if it fits."""
    match shape:
        case tuple():
            problems = [problem(value, one, name) for one in shape] or [f"its {name} is unknown"]
            return None if None in problems else problems[-1]
        case [each]:
            if not isinstance(value, list):
                return _expected(value, name, "a list")
            return next(filter(None, (problem(v, each, f"{name}[{n}]") for n, v in enumerate(value))), None)
        case Object():
            if not isinstance(value, dict):
                return _expected(value, name, "an object")
            if missing := [key for key in shape.needed if key not in value]:
                return f"its {_inside(name, missing[0])} is missing"
            shapes = {**shape.needed, **shape.known}
            found = (problem(v, shapes.get(key, shape.other), _inside(name, key)) for key, v in value.items())
            return next(filter(None, found), None)
        case Kind():
            return None if shape.fits(value) else _expected(value, name, shape.expected)
        case _:
            return None if value is None else _expected(value, name, "null")


def _inside(name: str, key: str) -> str:
    return printable(f"{name}.{key}" if name else key)[:60]


def _expected(value: Any, name: str, expected: str) -> str:
    nested = {dict: "an object", list: "a list"}.get(type(value))
    return f"its {name or 'content'} is {nested or format(repr(value), '.40')}; expected {expected}"


def is_number(value: object) -> bool:
    """Whether it is finite and within the range of a float."""
    if type(value) is int:
        return abs(value) < 2**1000
    return type(value) is float and math.isfinite(value)


NUMBER = Kind("a number", is_number)
POSITIVE = Kind("a number from 0 up", lambda value: is_number(value) and value >= -ROUNDING)
SHARE = Kind("a number from 0 to 1", lambda value: is_number(value) and -ROUNDING <= value <= 1 + ROUNDING)
COUNT = Kind("a whole number from 0 up", lambda value: type(value) is int and 0 <= value < 2**1000)
TEXT = Kind("text", lambda value: type(value) is str)
FLAG = Kind("true or false", lambda value: type(value) is bool)

FACTS = Object(needed={"bytes": COUNT, "sha256": TEXT})
MANIFEST = Object(needed={"version": COUNT, "step": COUNT, "files": Object(other=FACTS)})
ENVIRONMENT = Object(other=(COUNT, TEXT))
FIGURES = Object(
    needed={"loss": POSITIVE, "active_fraction": SHARE},
    known={"active_fraction_per_site": [SHARE], "accuracy": SHARE},
    other=(None, POSITIVE),
)
POINT = Object(
    needed={"sparse": FIGURES, "tlops_skipped": NUMBER, "flops_skipped": NUMBER, "flops_per_token": POSITIVE},
    other=(FIGURES, NUMBER),
)
PASSAGE = Object(
    needed={"pieces": [TEXT], "sites": [TEXT]},
    known={"soft": (None, [[SHARE]]), "hard": (None, [[SHARE]]), "surprisal": [(None, POSITIVE)]},
)
TIME = Object(
    known={"device": TEXT, "dtype": TEXT, "batch": COUNT, "context": COUNT, "speedup": POSITIVE},
    other=[POSITIVE],
)
EVALUATION = Object(
    needed={"hard": FIGURES},
    known={
        **dict.fromkeys(("method", "recipe", "corpus", "split"), TEXT),
        **dict.fromkeys(("version", "seed", "tokens", "parameters", "router_parameters", "decision_flips"), COUNT),
        **dict.fromkeys(("routed", "has_soft"), FLAG),
        **dict.fromkeys(("soft", "sparse", "untouched"), (None, FIGURES)),
        "controls": Object(other=FIGURES),
        "time": (None, TIME),
        "passage": (None, PASSAGE),
        "curve": [POINT],
        "env": ENVIRONMENT,
    },
    other=NUMBER,
)
"""eval.json; `other` fields are savings, FLOPs and the value of the method's dial."""
ANY = Kind("anything", lambda value: True)
ROW = Object(
    needed={"name": TEXT, "config": ANY, "evaluation": EVALUATION, "trained_on": (None, ENVIRONMENT)},
    known={"history": [Object(needed={"step": COUNT}, other=NUMBER)]},
    other=ANY,
)
"""One run in a results file."""
