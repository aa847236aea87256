"""Only the engine's thread computes."""

import subprocess
import sys
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


INTERRUPTED = """
import os, signal, sys, threading, time
import torch
from tokendepth.serve.worker import Worker

def make():
    os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        torch.ones(500, 500) @ torch.ones(500, 500)

try:
    Worker(make, queue=1, seconds=1, metrics=None)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_while_an_engine_is_made_ends_without_a_crash():
    """An interpreter that ends while another thread computes aborts the process."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_penalties_of_a_large_vocabulary_start_no_threads():
    """Handlers of requests prepare samplers, and only the engine's thread may compute on several cores."""
    script = """
import threading, torch
from pathlib import Path
from tokendepth.infer.sampling import Sampler, Sampling

torch.set_num_threads(2)
sampling = Sampling(repetition_penalty=2, presence_penalty=1, logit_bias={1: 1.0})
before = len(list(Path("/proc/self/task").iterdir()))
there = []
def prepare():
    Sampler(sampling, [1], 100_000, torch.device("cpu"))
    there.append(len(list(Path("/proc/self/task").iterdir())))
thread = threading.Thread(target=prepare)
thread.start()
thread.join()
print(there[0] - before)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "1\n", "its own"


def test_what_is_wrong_with_a_run_is_told_to_whoever_starts_its_service():
    def make() -> Engine:
        raise UserError("this run is damaged; restore the folder from a copy")

    with pytest.raises(UserError) as error:
        Service(make, "bottles", Limits(slots=1))
    assert one_line(error.value) == "this run is damaged; restore the folder from a copy"
