"""Answer the mistakes that people make on a command line in one line each, before a parser answers in a box."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from tokendepth.config import options, override, parse_value
from tokendepth.errors import UserError, did_you_mean
from tokendepth.recipes import RECIPES, recipe


def check(arguments: list[str], commands: dict[str, type]) -> None:
    """A UserError for an unknown command, recipe or option, a missing or wrong value, a word too many."""
    command, *rest = arguments
    if command not in commands:
        raise UserError(f"{command!r}: no such command; {did_you_mean(command, commands)}")
    hints = typing.get_type_hints(commands[command], include_extras=True)
    positional = {name: hint for name, hint in hints.items() if name == "recipe" or "Positional" in str(hint)}
    own = _flags({name: hint for name, hint in hints.items() if name not in positional})
    switches = {flag for flag, hint in own.items() if hint is bool}
    switches |= {flag.replace("--", "--no-", 1) for flag in switches}
    words, values = _split(rest, switches)
    for flag in [flag for flag in values if flag in own or flag in switches]:
        _check_own(flag, values.pop(flag), own.get(flag, bool), command)
    if "recipe" in positional:
        _check_recipe(words, values, command, set(own))
    else:
        for flag in values:
            raise UserError(f"{flag}: unknown option of {command}; {did_you_mean(flag, own) if own else 'drop it'}")
        _check_words(words, list(positional.values()), command)


def _flags(hints: dict[str, Any]) -> dict[str, Any]:
    """Every option with its type; those of a part, such as --data.corpus, by their dotted names."""
    found = {}
    for name, hint in hints.items():
        parts = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        inside = {f"{name}.{key}": kind for key, kind in parts.items()} or {name: hint}
        found |= {"--" + key.replace("_", "-"): kind for key, kind in inside.items()}
    return found


def _split(arguments: list[str], switches: set[str]) -> tuple[list[str], dict[str, str | None]]:
    """Bare words, and each --option with the word after it (None if it has none)."""
    words: list[str] = []
    values: dict[str, str | None] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        flag, joined, value = word.partition("=")
        if joined:
            values[flag] = value
        elif rest and not rest[0].startswith("--") and flag not in switches:
            values[flag] = rest.pop(0)
        else:
            values[flag] = None
    return words, values


def _check_own(flag: str, text: str | None, hint: Any, command: str) -> None:
    if hint is bool:
        return
    if text is None:
        raise UserError(f"{flag} needs a value; see: tokendepth {command} --help")
    if Path not in (hint, *typing.get_args(hint)):
        parse_value(hint, text, flag.removeprefix("--").replace("-", "_"))


def _check_recipe(words: list[str], values: dict[str, str | None], command: str, own: set[str]) -> None:
    if not words:
        raise UserError(f"{command} needs a recipe: one of {', '.join(RECIPES)}")
    config = recipe(words[0])
    if len(words) > 1:
        folder = "; a run folder is named by --out" if "--out" in own else ""
        raise UserError(f"{words[1]!r}: {command} takes one recipe and options; drop it{folder}")
    known, changes = options(config), {}
    for flag, text in values.items():
        if "." not in flag:
            raise UserError(f"{flag}: unknown option of {command}; {did_you_mean(flag, own)}")
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.replace(".no_", ".")
        if known.get(positive) is bool and text is None:
            changes[positive] = str(positive == name)
        elif text is None and name in known:
            raise UserError(f"{flag} needs a value; see: tokendepth {command} {words[0]} --help")
        else:
            changes[name] = text or ""
    override(config, changes)


def _check_words(words: list[str], hints: list[Any], command: str) -> None:
    """No words, one run, one of some names, or any number of runs: whatever the command takes."""
    kind = typing.get_args(hints[0])[0] if hints else None
    if typing.get_origin(kind) is tuple:
        return
    names = typing.get_args(kind)
    expected = "options only" if kind is None else f"one of {', '.join(names)}" if names else _one(kind)
    given = " ".join(words)
    if len(words) != len(hints) or (names and given not in names):
        found = f"was given {given!r}" if given else "was given no words"
        raise UserError(f"{command} {found}; expected {expected}; see: tokendepth {command} --help")


def _one(kind: Any) -> str:
    return "one run folder" if kind is Path else "one word"
