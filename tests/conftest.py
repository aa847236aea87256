"""What every test shares: an environment of its own, one thread, and the corpora where they are at hand."""

import gc
import os
import signal
from pathlib import Path

import pytest

HF = Path(__file__).parent / "hf"

# Before torch is imported, and inherited by every subprocess: xdist workers want one thread each.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

# A shell that starts a command in the background makes it ignore the keyboard's signals, and nohup that its terminal is
# gone; children inherit that.
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for _number, _usual in _USUAL.items():
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

gc.disable()  # while ten thousand tests are collected, none of which is garbage: saves five seconds

import torch  # noqa: E402

from tokendepth import progress  # noqa: E402
from tokendepth.runs.machine import commit  # noqa: E402

torch.set_num_threads(1)
progress.EVERY_S = 3600  # how much is said must not depend on how busy the machine is

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a bare GPU machine: the tests that need it say so themselves
    pass
else:
    settings.register_profile("tokendepth", deadline=None, derandomize=True, max_examples=25)
    settings.load_profile("tokendepth")


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory):
    """No setting of the user's reaches a test, and no test writes into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TOKENDEPTH_")]:
            patch.delenv(name)
        patch.setenv("TOKENDEPTH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TOKENDEPTH_COMMIT", commit())  # or every run would start git three times
        patch.setenv("MPLBACKEND", "Agg")
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """All tests of tests/hf are slow, and collecting them imports transformers, which takes seconds."""
    return True if config.option.markexpr == "not slow" and collection_path == HF else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups, which one worker takes from beginning to end, come first, so that no worker is left alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish() -> None:
    """What is there by now stays: the garbage collector need not look at ten thousand tests again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Forks a process for every order. Its users are in one group, "processes", so that torch is imported once."""
    from benchmarks.faults.processes import Server

    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server
