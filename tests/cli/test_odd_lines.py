"""Odd command lines, drawn at random: each is done, or answered in one line and with exit code 2."""

import dataclasses
import random
import string
import typing
from collections.abc import Iterator

import pytest

from benchmarks.__main__ import BENCHMARKS
from paper.__main__ import PAPER
from tests.tiny import tiny
from tokendepth.checks import flag
from tokendepth.cli.arguments import Program
from tokendepth.cli.main import TOKENDEPTH, main
from tokendepth.config import BudgetConfig, options
from tokendepth.errors import LONGEST_LINE
from tokendepth.recipes import recipe
from tokendepth.training.loop import train

PROGRAMS = (TOKENDEPTH, TOKENDEPTH, TOKENDEPTH, PAPER, BENCHMARKS)
SENSIBLE_WORDS = {"bench": ["forward"], "reproduce": ["all"], "sweep": ["demo.tsa:train.steps=2"]}
ODD_VALUES = (
    *("", " ", "-", "--", "=", "None", "True", "x" * 3000, "x y " * 1000, "'" * 300, "\N{FOX FACE}"),
    *("-1", "0", "1", "0.6", "1e30", "1e-40", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "\u0663", "\u00bd"),
    *("a\nb", "a\tb\r", "\x1b[31m", "a\0b", "\udcff", "\ud800", "kill,,", "0.1,nan", "1,x", "copy", "val", "cpu"),
    *("/", ".", "..", "/dev/null", "/dev/full", "/proc/self/mem", "a/" * 400, "a/" * 2000, "text:", "text:/"),
    *("bpe:", "bpe:0", "tokenizer:x", "shakespeare.tsa:", "shakespeare.tsa:train.steps=", "a:b=c=d"),
)


def odd_lines(seed: int, count: int, places: list[str]) -> Iterator[tuple[Program, list[str]]]:
    """Mostly one odd word in a line that makes sense, so that more than the first check is met; `places` are paths."""
    dice = random.Random(seed)
    values = [*ODD_VALUES, *places]
    for _ in range(count):
        program = dice.choice(PROGRAMS)
        name = dice.choice(list(program.commands))
        flags = _flags(program.commands[name])
        words = SENSIBLE_WORDS.get(name, _sensible_words(program.commands[name], places))
        if dice.random() < 0.2:
            words = dice.choices(values, k=dice.randint(0, 2))
        for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
            option = dice.choice(flags) if dice.random() < 0.95 else "--" + "".join(dice.choices(string.printable, k=5))
            value = dice.choice(values)
            words = [*words, *dice.choice(([f"{option}={value}"], [option, value], [option]))]
        if dice.random() < 0.05:
            name = dice.choice(values)
        yield program, [name, *words]


def _sensible_words(command: type, places: list[str]) -> list[str]:
    names = {field.name for field in dataclasses.fields(command)}
    return ["demo.budget"] if "recipe" in names else places[:1] if names & {"run", "runs"} else []


def _flags(command: type) -> list[str]:
    names = [field.name for field in dataclasses.fields(command)]
    if "recipe" in names:
        names += options(recipe("demo.budget"))
    return [flag(name) for name in names or ["json"]]


@pytest.fixture
def places(tmp_path) -> list[str]:
    """A finished run, a folder that is none, a file, and nothing."""
    train(tiny(tmp_path / "text", BudgetConfig(), steps=1), tmp_path / "run", show=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    return [str(tmp_path / name) for name in ("run", "empty", "file", "nothing")]


@pytest.fixture
def _no_long_work(monkeypatch, tmp_path):
    """Once a line is understood, what would take long is interrupted."""

    def interrupted(*_: object, **__: object) -> typing.NoReturn:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    for name in (
        *("tokendepth.training.loop.train", "tokendepth.training.sweep.sweep", "tokendepth.report.build"),
        *("tokendepth.bench.forward._compared", "tokendepth.bench.training._step"),
        *("tokendepth.bench.processes._measured", "paper.grid.fill", "benchmarks.faults.registry._undisturbed"),
    ):
        monkeypatch.setattr(name, interrupted)


@pytest.mark.usefixtures("_no_long_work")
def test_odd_lines_are_answered_in_one_line(places, capsys):
    codes = [_code(capsys, *line) for line in odd_lines(2, 80, places)]
    assert {2, 130} <= set(codes) <= {0, 2, 130}, "some are refused, some begin what takes long, some may be done"


def _code(capsys, program: Program, line: list[str]) -> int:
    """The exit code; fails where a refusal is not one line."""
    capsys.readouterr()
    try:
        main(line, program)
    except SystemExit as stop:
        code, said = stop.code, capsys.readouterr().err
        if code == 2:
            assert said.count("\n") == 1, (line, said)
            assert said.startswith("tokendepth: "), (line, said)
            assert len(said) <= LONGEST_LINE + len("tokendepth: \n"), (line, said)
        return code
    return 0
