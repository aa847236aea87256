"""The commands: each is a dataclass whose fields are the options, whose docstring is the help and `__call__` the work.

Imports are inside the commands, so that `tokendepth --help` does not load torch.
"""

from tokendepth.cli.commands.many import Bench, Sweep
from tokendepth.cli.commands.one import Calibrate, Demo, Describe, Doctor, Evaluate, Generate, Report, Train
from tokendepth.cli.commands.retrofit import Retrofit

COMMANDS: tuple[type, ...] = (
    Demo,
    Train,
    Retrofit,
    Evaluate,
    Calibrate,
    Sweep,
    Describe,
    Report,
    Generate,
    Bench,
    Doctor,
)
