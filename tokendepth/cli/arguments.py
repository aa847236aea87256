"""Give a one-line error for common command-line mistakes, before the parser prints a box of text."""

import dataclasses
import errno
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendepth.checks import flag
from tokendepth.config import RunConfig, options, override, parse_value, unknown_option
from tokendepth.errors import UserError, did_you_mean
from tokendepth.recipes import RECIPES, recipe


@dataclass(frozen=True)
class Program:
    """A command-line program; `name` is what users type before a command."""

    name: str
    description: str
    commands: dict[str, type]


Options = list[tuple[str, str | None]]

LONGEST_PATH = 1000
"""Operating systems allow at least 1,024 characters; the rest is for file names inside the folder."""
TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")


def check_names(arguments: list[str], program: Program) -> None:
    """A UserError for a command or recipe that does not exist, even if only its --help was asked for."""
    command, *rest = arguments
    if command not in program.commands:
        raise UserError(f"{command!r}: no such command; {did_you_mean(command, program.commands)}")
    if "recipe" in typing.get_type_hints(program.commands[command]) and rest and not rest[0].startswith("-"):
        recipe(rest[0])


def checked(arguments: list[str], program: Program) -> list[str]:
    """The arguments in a form that the parser cannot misread: command, words, then options joined to their values.

    A UserError for an unknown command, recipe or option, a missing or invalid value, or an extra word.
    """
    _check_characters(arguments)
    check_names(arguments, program)
    command, *rest = arguments
    ask = f"see: {program.name} {command} --help"
    hints = typing.get_type_hints(program.commands[command], include_extras=True)
    positional = {name: hint for name, hint in hints.items() if name == "recipe" or "Positional" in str(hint)}
    own = _flags({name: hint for name, hint in hints.items() if name not in positional})
    if "recipe" in positional:
        words, given = _split(rest, _switches(own) | _switches_of_recipes())
        config = _recipe(words, command, own)
        joined = _joined(given, own | _flags(options(config)), command, ask, config)
        override(config, _changes(given))
    else:
        words, given = _split(rest, _switches(own))
        joined = _joined(given, own, command, ask)
        _check_words(words, positional, command, ask)
    required = [f.name for f in dataclasses.fields(program.commands[command]) if f.default is dataclasses.MISSING]
    for name in required:
        if name not in positional and flag(name) not in dict(given):
            raise UserError(f"{command} needs {flag(name)} with a value; {ask}")
    if hasattr(program.commands[command], "__post_init__"):
        _check_together(program.commands[command], dict(zip(positional, words, strict=False)), given, own)
    return [command, *words, *joined]


def _check_characters(arguments: list[str]) -> None:
    """A shell passes only text that it can encode; other programs may pass anything."""
    for word in arguments:
        try:
            fits = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise UserError(f"{word!r} has a character that is not allowed in text or file names; leave it out")


def _flags(hints: dict[str, Any]) -> dict[str, Any]:
    """Every option with its type; nested ones, such as --data.corpus, by their dotted names."""
    found = {}
    for name, hint in hints.items():
        parts = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        inside = {f"{name}.{key}": kind for key, kind in parts.items()} or {name: hint}
        found |= {flag(key): kind for key, kind in inside.items()}
    return found


def _switches(known: dict[str, Any]) -> dict[str, str]:
    """Switches (options without a value) and their negations (--no-json, --method.no-dial), each with the switch."""
    on = [name for name, hint in known.items() if hint is bool]
    return {name: name for name in on} | {_off(name): name for name in on}


def _off(switch: str) -> str:
    part, dot, name = switch.removeprefix("--").rpartition(".")
    return f"--{part}{dot}no-{name}"


def _switches_of_recipes() -> dict[str, str]:
    """Switches of all recipes: they are needed to find which word is the recipe."""
    return {off: on for name in RECIPES for off, on in _switches(_flags(options(recipe(name)))).items()}


def _split(arguments: list[str], switches: dict[str, str]) -> tuple[list[str], Options]:
    """Bare words, and each option with the word after it (None if it has none)."""
    words: list[str] = []
    given: Options = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        name, joined, value = word.partition("=")
        name = name.replace("_", "-")
        if joined:
            given.append((name, value))
        elif rest and not rest[0].startswith("--") and (name not in switches or rest[0].lower() in TRUTH_VALUES):
            given.append((name, rest.pop(0)))
        else:
            given.append((name, None))
    return words, given


def _joined(
    given: Options, known: dict[str, Any], command: str, ask: str, config: RunConfig | None = None
) -> list[str]:
    """Each option as one argument, if it exists and has a value that can be read."""
    switches = _switches(known)
    joined = []
    for name, text in given:
        if name in switches:
            if text is not None:
                both = f"{switches[name]} or {_off(switches[name])}"
                raise UserError(f"{name} was given {text!r}, but takes no value; write {both}")
            joined.append(name)
        elif name in known:
            joined.append(f"{name}={_value(name, text, known[name], ask)}")
        elif config:
            raise UserError(unknown_option(_dotted(name), config, known))
        else:
            hint = did_you_mean(name, known) if known else "drop it"
            if command == "sweep" and "." in name:  # an option of the runs
                hint = f"write it behind each recipe, as in demo.tsa:{_dotted(name)}={text or 'VALUE'}"
            raise UserError(f"{name}: unknown option of {command}; {hint}")
    return joined


def _value(name: str, text: str | None, hint: Any, ask: str) -> str:
    kinds = (hint, *typing.get_args(hint))
    if text is None:
        dashes = f" (join one that begins with two dashes: {name}=--this)" if str in kinds else ""
        raise UserError(f"{name} needs a value{dashes}; {ask}")
    if Path in kinds:
        _check_path(name, text)
    elif not any(typing.get_origin(kind) is tuple for kind in kinds):  # any word is valid
        parse_value(hint, text, _dotted(name))
    return text


def _check_together(command: type, words: dict[str, str], given: Options, known: dict[str, Any]) -> None:
    """Construct the command once to see the errors of its own checks, which the parser would hide."""
    switches, values, parts = _switches(known), dict[str, Any](), dict[str, dict[str, Any]]()
    for name, text in given:
        on = switches.get(name, name)
        part, _, key = _dotted(on).rpartition(".")
        if text is None:
            value = on == name
        elif Path in (known[on], *typing.get_args(known[on])):
            value = Path(text)
        else:
            value = parse_value(known[on], text, _dotted(on))
        (parts.setdefault(part, {}) if part else values)[key] = value
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(command)}
    changed = {part: dataclasses.replace(fields[part], **inside) for part, inside in parts.items()}
    command(**words | values | changed)


def _check_path(name: str, text: str) -> None:
    if not text:
        raise UserError(f"{name} is empty; expected a path; for the current folder write {name} .")
    try:
        os.stat(text)
        too_long = False
    except OSError as error:
        too_long = error.errno == errno.ENAMETOOLONG
    if too_long or len(text) > LONGEST_PATH:
        raise UserError(f"{name} is {text!r}: too long for a name on this disk; choose a shorter one")


def _dotted(name: str) -> str:
    """As a config spells it: train.batch_size for --train.batch-size."""
    return name.lstrip("-").replace("-", "_")


def _recipe(words: list[str], command: str, own: dict[str, Any]) -> RunConfig:
    if not words:
        raise UserError(f"{command} needs a recipe: one of {', '.join(RECIPES)}")
    config = recipe(words[0])
    if len(words) > 1:
        folder = "; set the run folder with --out" if "--out" in own else ""
        raise UserError(f"{words[1]!r}: {command} takes one recipe and options; drop it{folder}")
    return config


def _changes(given: Options) -> dict[str, str]:
    """What the options change in the recipe."""
    switches, changes = _switches_of_recipes(), {}
    for name, text in given:
        if "." in name:
            on = switches.get(name, name)
            changes[_dotted(on)] = str(on == name) if text is None else text
    return changes


def _check_words(words: list[str], positional: dict[str, Any], command: str, ask: str) -> None:
    """Check the bare words: none, one run, one of some names, any number of runs, or several paths."""
    if "" in words:
        raise UserError(f"{command} was given an empty argument; for the current folder write a dot; {ask}")
    kinds = [typing.get_args(hint)[0] for hint in positional.values()]
    kind = kinds[0] if kinds else None
    for word in words if Path in (kind, *typing.get_args(kind)) else ():
        _check_path("the run folder" if len(kinds) == 1 else "a path", word)
    if typing.get_origin(kind) is tuple:
        return
    names = typing.get_args(kind)
    expected = "options only" if kind is None else f"one of {', '.join(names)}" if names else _one(kind)
    if len(kinds) > 1:
        expected = " ".join(name.upper() for name in positional)
    given = " ".join(words)
    if len(words) != len(kinds) or (names and given not in names):
        found = f"was given {given!r}" if given else "was given no arguments"
        raise UserError(f"{command} {found}; expected {expected}; {ask}")


def _one(kind: Any) -> str:
    return "one run folder" if kind is Path else "one argument"


def draft_share(text: str | None) -> bool | float:
    """The value of --speculate as `td.generate` takes it."""
    if text in (None, "auto"):
        return text is not None
    try:
        return float(text)
    except ValueError:
        expected = "expected auto, or a share of tokens such as 0.2"
        raise UserError(f"--speculate is {text!r}; {expected}") from None
