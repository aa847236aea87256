"""A message is one line, whatever it quotes, and keeps its beginning and its end."""

import pytest

from tests.tiny import one_line
from tokendepth.errors import LONGEST_LINE, LONGEST_VALUE, UserError


def said(message: str) -> str:
    return one_line(UserError(message))


def test_what_is_short_is_left_alone():
    line = f"--out is '{'a' * (LONGEST_VALUE - 5)}': the disk's full; \u201cfree\u201d some \N{FOX FACE}"
    assert said(line) == line


@pytest.mark.parametrize(
    "quoted", ["a" * 3000, "a b " * 750, "it's " * 600, 'a "b" ' * 500, "a" * 200 + "'s " + "b" * 99]
)
def test_a_long_value_loses_its_middle(quoted):
    line = said(f"--out is {quoted!r}: no such file, as in this machine's list; name another")
    assert line.startswith(f"--out is {quoted!r}"[:60])
    assert "more characters]" in line
    assert line.endswith(": no such file, as in this machine's list; name another")
    assert len(line) < LONGEST_VALUE + 150


def test_a_long_word_loses_its_middle_without_quotation_marks_too():
    line = said(f"/{'a/' * 1500}: no such run; train one")
    assert line.startswith("/a/a/")
    assert line.endswith("/a/: no such run; train one")
    assert len(line) < LONGEST_VALUE + 50


def test_a_line_has_an_end():
    line = said(f"--{'a ' * 3000}: unknown option; drop it")
    assert line.endswith("unknown option; drop it")
    assert len(line) <= LONGEST_LINE


@pytest.mark.parametrize(
    ("odd", "shown"), [("\n", r"\n"), ("\r\x1b[31m", r"\r\x1b[31m"), ("\u2028", r"\u2028"), ("\udcff", r"\udcff")]
)
def test_what_cannot_be_printed_is_escaped(odd, shown):
    assert said(f"run a{odd}b: no such run") == f"run a{shown}b: no such run"
