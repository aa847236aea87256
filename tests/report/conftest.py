from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.fakes import write_run
from tokendepth.runs.run import Run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda name, *args, **options: write_run(tmp_path / "runs" / name, *args, **options)
