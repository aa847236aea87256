"""The commands: each is a dataclass whose fields are the options, whose docstring is the help and `__call__` the work.

Imports are inside the commands, so that `tokendepth --help` does not load torch.
"""

from tokendepth.cli.commands.many import Bench, Sweep
from tokendepth.cli.commands.one import Calibrate, Demo, Describe, Doctor, Evaluate, Export, Generate, Report, Train

COMMANDS: tuple[type, ...] = (
    Demo,
    Train,
    Evaluate,
    Calibrate,
    Sweep,
    Describe,
    Report,
    Generate,
    Export,
    Bench,
    Doctor,
)
