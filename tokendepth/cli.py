"""The command line. tyro reads the arguments; a mistake is answered in one line and with exit code 2."""

import contextlib
import io
import os
import sys
from typing import Annotated, Any, Union

import tyro

import tokendepth
from tokendepth.arguments import check
from tokendepth.commands import COMMANDS
from tokendepth.errors import Interrupted, SaidElsewhere, UserError

_NAMES = {command.__name__.lower(): command for command in COMMANDS}


def parse(arguments: list[str]) -> Any:
    """The command that the arguments ask for; a UserError where they make no sense."""
    choices = tuple(Annotated[c, tyro.conf.subcommand(name, prefix_name=False)] for name, c in _NAMES.items())
    asks_for_help = not arguments or any(a in ("-h", "--help") or a.startswith("--tyro-") for a in arguments)
    if not asks_for_help:
        check(arguments, _NAMES)
    complaint = io.StringIO()
    with contextlib.nullcontext() if asks_for_help else contextlib.redirect_stderr(complaint):
        try:
            return tyro.cli(  # pyright: ignore[reportCallIssue]
                Union[choices],  # noqa: UP007  # pyright: ignore[reportArgumentType, reportCallIssue]
                prog="tokendepth",
                description="Transformers in which every token gets only the depth it needs.",
                args=arguments or ["--help"],
                config=(tyro.conf.CascadeSubcommandArgs,),
            )
        except SystemExit as stop:
            if stop.code and not asks_for_help:
                words = " ".join(arguments)
                raise UserError(f"cannot read {words!r}; see: tokendepth {arguments[0]} --help") from None
            raise


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"tokendepth {tokendepth.__version__}")
        return
    try:
        parse(arguments)()
    except UserError as error:
        if not isinstance(error, SaidElsewhere):
            print(f"tokendepth: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stopped:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"tokendepth: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        print("tokendepth: interrupted before there was anything to save", file=sys.stderr)
        sys.exit(130)
    except (
        BrokenPipeError
    ):  # a reader such as `head` left early: no error of ours, but stdout must not be flushed again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
