"""Only the engine's thread computes."""

import threading

import pytest

from tests.tiny import one_line
from tokendepth.errors import UserError
from tokendepth.infer.engine import Engine
from tokendepth.infer.generate import tokenizer_of
from tokendepth.measure.evaluate import load_model
from tokendepth.runs.machine import choose_device
from tokendepth.serve.service import Limits, Service

pytestmark = pytest.mark.xdist_group("serve")


def test_one_thread_makes_the_engine_and_steps(run, monkeypatch):
    seen, step = [], Engine.step

    def told(self):
        seen.append(threading.current_thread())
        return step(self)

    def make() -> Engine:
        seen.append(threading.current_thread())
        return Engine(load_model(run, choose_device("cpu")), tokenizer_of(run), slots=1)

    monkeypatch.setattr(Engine, "step", told)
    service, written = Service(make, "bottles", Limits(slots=1)), threading.Event()
    service.worker.submit([service.engine.prepare([1], max_tokens=2)], lambda _, token, end: end and written.set())
    assert written.wait(20)
    service.worker.stop()
    assert len(seen) == 3
    assert len({*seen, threading.main_thread()}) == 2


def test_what_is_wrong_with_a_run_is_told_to_whoever_starts_its_service():
    def make() -> Engine:
        raise UserError("this run is damaged; restore the folder from a copy")

    with pytest.raises(UserError) as error:
        Service(make, "bottles", Limits(slots=1))
    assert one_line(error.value) == "this run is damaged; restore the folder from a copy"
