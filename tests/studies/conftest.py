"""One miniature of the whole reproduction, by the command, for all who look at it."""

import time
from pathlib import Path

import pytest

from tokendepth.cli import main


@pytest.fixture(scope="session")
def quick(tmp_path_factory) -> tuple[Path, float]:
    """The folder that `reproduce all --quick` was told to fill, and the seconds it took."""
    out = tmp_path_factory.mktemp("quick")
    started = time.perf_counter()
    main(["reproduce", "all", "--quick", "--out", str(out)])
    return out, time.perf_counter() - started
