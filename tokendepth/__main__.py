"""The command `tokendepth`; `python -m tokendepth` does the same, even without installation."""

import sys


def main() -> None:
    try:
        from tokendepth.cli.main import main as command
    except KeyboardInterrupt:  # there is nothing to save yet
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
