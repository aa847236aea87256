"""One miniature of the whole reproduction, by the command, for all who look at it."""

import time
from pathlib import Path

import pytest

from paper.__main__ import PAPER
from tokendepth.cli.main import main


@pytest.fixture(scope="session")
def quick(tmp_path_factory) -> tuple[Path, float]:
    """The folder that `reproduce all --quick` was told to fill, and the seconds it took of a processor.

    Not of the clock, which also runs while another test has the processor.
    """
    out = tmp_path_factory.mktemp("quick")
    started = time.process_time()
    main(["reproduce", "all", "--quick", "--out", str(out)], PAPER)
    return out, time.process_time() - started
