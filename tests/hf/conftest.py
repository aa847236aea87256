"""What the tests of tokendepth.hf share: transformers, without its progress bars, in one worker."""

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/hf/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("transformers"))


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
