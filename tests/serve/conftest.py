"""A server for a tiny run, in a thread on a free port, and clients."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("openai", reason="the openai client is not installed")

import openai
from fastapi import FastAPI

from tests.tiny import tiny
from tokendepth.config import BudgetConfig
from tokendepth.infer.engine import Engine
from tokendepth.infer.generate import tokenizer_of
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import load_model
from tokendepth.runs.machine import choose_device
from tokendepth.runs.run import Run
from tokendepth.serve.app import create_app
from tokendepth.serve.server import listening, server
from tokendepth.serve.service import Limits, Service
from tokendepth.training.loop import train


@dataclass(frozen=True)
class Served:
    service: Service
    port: int
    key: str | None
    app: FastAPI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    def wait_until_free(self) -> None:
        """Wait until no request runs or waits."""
        start = time.monotonic()
        while self.service.worker.open:
            assert time.monotonic() < start + 30, "a slot is still taken"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(service: Service, key: str | None = None) -> Iterator[Served]:
    with listening("127.0.0.1", 0) as listener:
        app = create_app(service, key)
        running = server(app)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield Served(service, listener.getsockname()[1], key, app)
        finally:
            running.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
            assert not service.worker.alive


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """A model with a dial and stored thresholds for one more budget."""
    folder: Path = tmp_path_factory.mktemp("served")
    trained = train(tiny(folder, BudgetConfig(), steps=4, context=64), folder / "bottles", show=False)
    model = load_model(trained, choose_device("cpu"))
    calibrate.set_budget(model, trained, 0.8)
    calibrate.keep(model, trained, 0.8)
    return trained


@pytest.fixture(scope="module")
def served(run) -> Iterator[Served]:
    with serving(Service.of(run, "cpu", Limits(slots=4, queue=8))) as found:
        yield found


@pytest.fixture
def slow_service(run, monkeypatch) -> Callable[..., Service]:
    """Services with slow steps, so that requests are still running when something happens to them."""
    step = Engine.step

    def make(seconds_a_step: float, **limits) -> Service:
        def slowly(self):
            time.sleep(seconds_a_step)
            return step(self)

        monkeypatch.setattr(Engine, "step", slowly)
        return Service.of(run, "cpu", Limits(**limits))

    return make


@pytest.fixture(scope="session")
def tokenizer(run):
    return tokenizer_of(run)
