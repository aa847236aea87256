"""Small runs of several methods, and the explorer serving some of them in a thread on a free port."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.tiny import tiny
from tokendepth.config import BudgetConfig, DenseConfig, EarlyExitConfig, MethodConfig, SpanConfig, TSAConfig
from tokendepth.explore.app import create_app
from tokendepth.explore.explored import Explored
from tokendepth.measure import calibrate
from tokendepth.runs.run import Run
from tokendepth.serve.server import listening, server
from tokendepth.training.loop import train

METHODS: dict[str, MethodConfig] = {
    "dense": DenseConfig(),
    "tsa": TSAConfig(),
    "budget": BudgetConfig(),
    "early_exit": EarlyExitConfig(),
    "span": SpanConfig(),
}
CONTEXT = 32


@dataclass(frozen=True)
class Page:
    explored: list[Explored]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for_budgets(self) -> None:
        deadline = time.monotonic() + 60
        while any(each.facts["dial"] and each.facts["dial"]["coming"] for each in self.explored):
            assert time.monotonic() < deadline, "thresholds are still being found"
            time.sleep(0.02)


@contextlib.contextmanager
def exploring(*runs: Run) -> Iterator[Page]:
    explored = [Explored(run, "cpu") for run in runs]
    with listening("127.0.0.1", 0) as listener:
        running = server(create_app(explored))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield Page(explored, listener.getsockname()[1])
        finally:
            running.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def _thresholds_of_a_short_text():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "FIRST_TOKENS", 2**12)
        yield


@pytest.fixture(scope="session")
def run_of(tmp_path_factory) -> Callable[[str], Run]:
    """Trained runs by method, each trained once."""
    made: dict[str, Run] = {}

    def make(method: str) -> Run:
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            config = tiny(folder, METHODS[method], steps=4, n_layer=4, context=CONTEXT)
            made[method] = train(config, folder / f"bottles-{method}", show=False)
        return made[method]

    return make
