"""Shared by the tests of tokendepth.hf: transformers without progress bars, in one worker."""

import pytest

try:
    import transformers
except ModuleNotFoundError:  # the extra hf is not installed
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/hf/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("transformers"))
            item.add_marker(pytest.mark.slow)  # importing transformers alone takes seconds


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    """Silences progress bars and advice of transformers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
