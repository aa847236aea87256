"""What a user sees instead of a traceback: a mistake, or that the command was interrupted."""

import difflib
import re
import signal
from collections.abc import Iterable, Mapping

LONGEST_VALUE = 200
LONGEST_LINE = 2000
_LONG_VALUE = re.compile(rf"""(?<!\w)(['"])(?:(?!\1).){{{LONGEST_VALUE},}}\1(?!\w)|\S{{{LONGEST_VALUE},}}(?<![;:,.])""")
"""In quotation marks, or without a space."""


class UserError(ValueError):
    """A user error or a machine fault, explained in one line.

    The command line prints it and exits with code 2; any other exception is shown with its traceback and is probably a
    bug in tokendepth.

    >>> td.recipe("shakespeare.tas")
    Traceback (most recent call last):
    tokendepth.errors.UserError: 'shakespeare.tas': no such recipe; did you mean 'shakespeare.tsa'?
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ReportedByOtherRank(UserError):
    """Another rank of the same training raised, and prints why."""

    def __init__(self) -> None:
        super().__init__("another rank stopped; its message says why")


class ReaderGone(Exception):
    """The reader of stdout has gone, as `head` does after some lines: the command ends, without an error."""

    exit_code = 141  # as if by SIGPIPE


class Interrupted(Exception):
    """A signal asked the process to end; everything up to `step` is saved."""

    def __init__(self, number: int, step: int, path: object) -> None:
        name = signal_name(number)
        super().__init__(f"{name} after step {step}: {path} is saved; repeat the command with --resume to continue")
        self.exit_code = 128 + number


class SweepStopped(Interrupted):
    """A signal asked a sweep to end; its workers have saved their runs."""

    def __init__(self, number: int, path: object) -> None:
        name = signal_name(number)
        Exception.__init__(self, f"{name}: every run in {path} is saved; repeat the command to continue")
        self.exit_code = 128 + number


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time ones only the first and the last have a name
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def one_line(message: str) -> str:
    """`message` on one line, with long values shortened; done here so that no caller has to."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    line = _LONG_VALUE.sub(lambda value: _without_middle(value[0], LONGEST_VALUE), line)
    return _without_middle(line, LONGEST_LINE)


def _without_middle(text: str, longest: int) -> str:
    """Keep both ends: the beginning, and the end of the line, which holds the remedy."""
    if len(text) <= longest:
        return text
    head, tail = longest // 2, longest // 4
    return f"{text[:head]}[{len(text) - head - tail:,} more characters]{text[-tail:]}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: Python raises MemoryError, torch two kinds of RuntimeError."""
    words = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in words or "out of memory" in words


def did_you_mean(word: str, options: Iterable[str], spellings: Mapping[str, str] | None = None) -> str:
    """A hint to append to a message: the nearest option, else all of them. `spellings` maps other names to options."""
    options = sorted(options)
    # Leading dashes do not count as similarity.
    named = {option.lstrip("-"): option for option in options} | dict(spellings or {})
    near = difflib.get_close_matches(word.lstrip("-"), named, n=1, cutoff=0.5)
    if near:
        return f"did you mean {named[near[0]]!r}?"
    return "expected one of " + ", ".join(options)
