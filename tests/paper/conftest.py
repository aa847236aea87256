"""Miniatures that take no longer than they must, and one of the whole reproduction for all who look at it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from paper.__main__ import PAPER
from tokendepth.cli.main import main
from tokendepth.measure import calibrate
from tokendepth.training import loop


@pytest.fixture
def undrawn() -> Iterator[pytest.MonkeyPatch]:
    """Empty figures, for tests that read only the pages around them; after `undo` figures are drawn again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda *_, **__: None)
        patch.setattr(Figure, "draw_without_rendering", lambda _: None)
        yield patch


@pytest.fixture(scope="module", autouse=True)
def _few_tokens():
    """The thresholds of a miniature need not hold on other text, and its losses are not used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "FIRST_TOKENS", 2**10)
        patch.setattr(calibrate, "MOST_TOKENS", 2**10)
        patch.setattr(loop, "VALIDATION_TOKENS", 2**10)
        yield


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[Path, float]:
    """The folder that `reproduce all --quick` was told to fill, and the seconds it took of a processor.

    Not of the clock, which also runs while another test has the processor.
    """
    out = tmp_path_factory.mktemp("quick")
    started = time.process_time()
    main(["reproduce", "all", "--quick", "--out", str(out)], PAPER)
    return out, time.process_time() - started
