"""The command line. tyro reads the arguments; a mistake gives a one-line error and exit code 2."""

import atexit
import contextlib
import errno
import gc
import io
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union

import tyro

import tokendepth
from tokendepth.cli.arguments import Program, check_names, checked
from tokendepth.cli.commands import COMMANDS
from tokendepth.cli.commands.describe import DescribeRun
from tokendepth.errors import Interrupted, ReaderGone, ReportedByOtherRank, UserError, is_out_of_memory, one_line
from tokendepth.streams import standard_streams

COMPLETION = "--tyro-print-completion"
SHELLS = ("bash", "zsh", "tcsh", "fish")
NARROWEST = 40
"""Columns. tyro draws help in boxes that take four; with fewer than five its layout never ends."""

atexit.register(gc.freeze)  # else the interpreter looks for garbage among all of torch's objects before it ends


def program(name: str, description: str, commands: tuple[type, ...]) -> Program:
    return Program(name, description, {command.__name__.lower(): command for command in commands})


TOKENDEPTH = program("tokendepth", "Train, measure and run transformers in which some tokens skip layers.", COMMANDS)


def parse(arguments: list[str], of: Program = TOKENDEPTH) -> Any:
    """The command that the arguments ask for; a UserError if they make no sense."""
    if arguments[:1] == ["describe"] and any(os.sep in word or Path(word).is_dir() for word in arguments[1:2]):
        of = replace(of, commands={**of.commands, "describe": DescribeRun})
    if arguments[:1] == [COMPLETION] and arguments[1:] not in ([shell] for shell in SHELLS):
        raise UserError(f"{COMPLETION} was given {' '.join(arguments[1:])!r}; expected one of {', '.join(SHELLS)}")
    asks_for_help = not arguments or arguments[0] == COMPLETION or any(a in ("-h", "--help") for a in arguments)
    if not asks_for_help:
        arguments = checked(arguments, of)
    elif arguments and not arguments[0].startswith("-"):
        check_names(arguments, of)
    complaint = io.StringIO()
    with contextlib.nullcontext() if asks_for_help else contextlib.redirect_stderr(complaint):
        try:
            return _read(arguments or ["--help"], of)
        except SystemExit as stop:
            if stop.code and not asks_for_help:
                words = " ".join(arguments)
                raise UserError(f"cannot read {words!r}; see: {of.name} {arguments[0]} --help") from None
            raise


def _read(arguments: list[str], of: Program) -> Any:
    """Parse with tyro, which makes no subcommand of a single command: so one command is parsed by itself."""
    config = (tyro.conf.CascadeSubcommandArgs,)
    name = next(iter(of.commands)) if len(of.commands) == 1 else arguments[0]
    if name in of.commands:
        words = arguments[1:] if arguments[0] == name else arguments
        return tyro.cli(of.commands[name], prog=f"{of.name} {name}", args=words, config=config)
    choices = tuple(Annotated[c, tyro.conf.subcommand(name, prefix_name=False)] for name, c in of.commands.items())
    return tyro.cli(  # pyright: ignore[reportCallIssue]
        Union[choices],  # noqa: UP007  # pyright: ignore[reportArgumentType, reportCallIssue]
        prog=of.name,
        description=of.description,
        args=arguments,
        config=config,
    )


@standard_streams()
def main(arguments: list[str] | None = None, of: Program = TOKENDEPTH) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what the terminal cannot show, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    try:
        try:
            if arguments == ["--version"]:
                print(f"tokendepth {tokendepth.__version__}")
            else:
                parse(arguments, of)()
        finally:
            sys.stdout.flush()  # here, where a closed stdout can still be handled
    except ReaderGone as gone:
        sys.exit(gone.exit_code)
    except ReportedByOtherRank:
        sys.exit(2)
    except UserError as error:
        _refuse(_too_many_files(error) or str(error))
    except Interrupted as stopped:
        if os.environ.get("RANK", "0") == "0":
            _say(str(stopped))
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        _say("interrupted; what was saved before is intact")
        sys.exit(130)
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        line = _fault_of_the_machine(error)
        if line is None:  # a bug of ours
            raise
        _refuse(line)


def _fault_of_the_machine(error: Exception) -> str | None:
    """The line for a fault of the machine, with its remedy; None for any other error."""
    if line := _too_many_files(error):
        return line
    if isinstance(error, ImportError) and not (error.name or "").startswith("tokendepth"):
        return f"a required package cannot be imported ({error}); install tokendepth again"
    if is_out_of_memory(error):
        return (
            f"not enough memory ({_first_line(error):.120}); what was saved is intact; "
            "use a smaller model, context or batch (or more --train.accumulate), or a larger machine"
        )
    return None


def _too_many_files(error: Exception) -> str | None:
    """A library may have wrapped the system's error in one of its own."""
    if not any(os.strerror(number) in str(error) for number in (errno.EMFILE, errno.ENFILE)):
        return None
    return "too many files are open; what was saved is intact; raise the limit and repeat the command: ulimit -n 1024"


def _say(line: str) -> None:
    print(f"tokendepth: {one_line(line)}", file=sys.stderr)


def _refuse(line: str) -> NoReturn:
    _say(line)
    sys.exit(2)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)  # Python's own MemoryError has no message
