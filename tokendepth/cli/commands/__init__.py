"""The commands. Each is a dataclass: its fields are the options, its docstring the help, its `__call__` the work.

Imports are inside the commands, so that `tokendepth --help` does not load torch.
"""

from tokendepth.cli.commands.analyse import Analyse
from tokendepth.cli.commands.describe import Describe
from tokendepth.cli.commands.many import Bench, Sweep
from tokendepth.cli.commands.one import (
    Calibrate,
    Demo,
    Doctor,
    Evaluate,
    Export,
    Generate,
    Import,
    Report,
    Train,
)
from tokendepth.cli.commands.retrofit import Retrofit
from tokendepth.cli.commands.score import Score
from tokendepth.cli.commands.serve import Explore, Serve

COMMANDS: tuple[type, ...] = (
    Demo,
    Train,
    Import,
    Retrofit,
    Evaluate,
    Score,
    Analyse,
    Explore,
    Calibrate,
    Sweep,
    Describe,
    Report,
    Generate,
    Serve,
    Export,
    Bench,
    Doctor,
)
