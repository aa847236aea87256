"""Every test has its own cache folder, no TOKENDEPTH_DATA and no network."""

import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

_SHARED = Path(os.environ.get("TOKENDEPTH_DATA") or Path(__file__).parents[3] / "shared" / "data")


def _no_network(*args, **kwargs):
    raise urllib.error.URLError("no network in tests")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TOKENDEPTH_DATA", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", _no_network)
    return tmp_path / "cache"


@pytest.fixture
def published_data(monkeypatch):
    """A function that makes the real copy of a corpus available, or skips the test."""

    def use(file_name):
        if not (_SHARED / file_name).is_file():
            pytest.skip(f"no {file_name}: set TOKENDEPTH_DATA to a folder that has it")
        monkeypatch.setenv("TOKENDEPTH_DATA", str(_SHARED))

    return use
