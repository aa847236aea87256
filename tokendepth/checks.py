"""Checks of config values: an invalid one raises a `UserError` with the value, what was expected and the option."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, Literal

from tokendepth.errors import UserError


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise UserError(f"{name} is {value!r}; expected {expected}; set it with {flag(name)}")


def check_range(name: str, value: float, low: float, high: float = math.inf, *, below: bool = False) -> None:
    """`below` excludes the upper end. Written so that NaN fails."""
    if low <= value and (value < high if below else value <= high) and not math.isinf(value):
        return
    if math.isinf(high):
        expected = f"a number from {_digits(low)} up"
    else:
        expected = f"a number from {_digits(low)} to {_digits(high)}" + (" (exclusive)" if below else "")
    check(False, name, value, expected)


def check_positive(name: str, value: float) -> None:
    check(0 < value <= 1000, name, value, "a number above 0 and up to 1000")


def check_budget(name: str, budget: float) -> None:
    check(0 < budget <= 1, name, budget, "a number above 0 and up to 1, the share of tokens to process")


def _digits(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


@functools.cache
def types_of(config: type) -> typing.Mapping[str, Any]:
    """Types of the fields, by name. Cached, since pages read thousands of configs."""
    return types.MappingProxyType(typing.get_type_hints(config))


def check_types(config: object, part: str) -> None:
    """Check that every field has the type of its annotation, even if it was not read from JSON."""
    for key, hint in types_of(type(config)).items():
        coerce(hint, getattr(config, key), f"{part}.{key}")


def printable(word: object) -> str:
    """A name from a file or a shell, on one line."""
    return repr(str(word))[1:-1]


def is_optional(hint: Any) -> bool:
    """Whether the hint allows None; Python represents `int | None` and `Literal[...] | None` differently."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def coerce(hint: Any, value: object, name: str) -> Any:
    """`value` if it is of the type `hint`, else a UserError. Only an int may stand for a float."""
    if type(value) is hint:  # as nearly always
        return value
    if dataclasses.is_dataclass(value):  # already built
        return value
    if typing.get_origin(hint) is Literal:
        options = typing.get_args(hint)
        check(value in options, name, value, "one of " + ", ".join(map(str, options)))
        return value
    if is_optional(hint):
        if value is None:
            return None
        (inner,) = (option for option in typing.get_args(hint) if option is not type(None))
        return coerce(inner, value, name)
    if hint is float and type(value) is int and abs(value) < 2**1000:
        value = float(value)
    expected = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    check(type(value) is hint, name, value, expected[hint])
    return value
