"""The command line. tyro reads the arguments; a mistake is answered in one line and with exit code 2."""

import contextlib
import io
import os
import sys
from typing import Annotated, Any, NoReturn, Union

import tyro

import tokendepth
from tokendepth.cli.arguments import Program, check_names, checked
from tokendepth.cli.commands import COMMANDS
from tokendepth.errors import Interrupted, ReaderGone, ReportedByOtherRank, UserError, is_out_of_memory
from tokendepth.streams import standard_streams

COMPLETION = "--tyro-print-completion"
SHELLS = ("bash", "zsh", "tcsh", "fish")


def program(name: str, description: str, commands: tuple[type, ...]) -> Program:
    return Program(name, description, {command.__name__.lower(): command for command in commands})


TOKENDEPTH = program("tokendepth", "Transformers in which every token gets only the depth it needs.", COMMANDS)


def parse(arguments: list[str], of: Program = TOKENDEPTH) -> Any:
    """The command that the arguments ask for; a UserError where they make no sense."""
    choices = tuple(Annotated[c, tyro.conf.subcommand(name, prefix_name=False)] for name, c in of.commands.items())
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
            return tyro.cli(  # pyright: ignore[reportCallIssue]
                Union[choices],  # noqa: UP007  # pyright: ignore[reportArgumentType, reportCallIssue]
                prog=of.name,
                description=of.description,
                args=arguments or ["--help"],
                config=(tyro.conf.CascadeSubcommandArgs,),
            )
        except SystemExit as stop:
            if stop.code and not asks_for_help:
                words = " ".join(arguments)
                raise UserError(f"cannot read {words!r}; see: {of.name} {arguments[0]} --help") from None
            raise


@standard_streams()
def main(arguments: list[str] | None = None, of: Program = TOKENDEPTH) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            if arguments == ["--version"]:
                print(f"tokendepth {tokendepth.__version__}")
            else:
                parse(arguments, of)()
        finally:
            sys.stdout.flush()  # here, where it can still be answered that nobody takes it
    except ReaderGone as gone:
        sys.exit(gone.exit_code)
    except ReportedByOtherRank:
        sys.exit(2)
    except UserError as error:
        _refuse(str(error))
    except ImportError as error:
        if (error.name or "").startswith("tokendepth"):  # a bug of ours
            raise
        _refuse(f"a needed package cannot be imported ({error}); install tokendepth again")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _refuse(
            f"there is not enough memory ({_first_line(error):.120}); what was saved is intact; "
            "take a smaller model, context or batch (or more --train.accumulate), or a larger machine"
        )
    except Interrupted as stopped:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"tokendepth: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        print("tokendepth: interrupted before there was anything to save", file=sys.stderr)
        sys.exit(130)


def _refuse(line: str) -> NoReturn:
    print(f"tokendepth: {line}", file=sys.stderr)
    sys.exit(2)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)  # Python's own MemoryError says nothing
