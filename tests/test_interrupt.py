"""Processes that are killed, and asked to stop: what they leave is gone on with, and ends bit for bit the same.

The processes are forks of one server that has imported torch, so that a process costs a tenth of a second, not two.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from tests.tiny import one_line, steady, tiny
from tokendepth import train as train_module
from tokendepth.config import RunConfig, TSAConfig, to_dict
from tokendepth.runs import Run
from tokendepth.train import Interrupted, train

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20

SERVER = """
import json, os, signal, sys, time, traceback
import torch
torch.set_num_threads(1)
from tokendepth import train as module
from tokendepth.config import from_dict
from tokendepth.errors import UserError
from tokendepth.runs import Run


def say(what, value):
    os.write(1, (json.dumps([order["number"], what, value]) + chr(10)).encode())


def told(owner, name, before=None, after=None):
    real = getattr(owner, name)

    def wrapped(self, number, *rest):
        if before:
            say(before, number)
        result = real(self, number, *rest)
        if after:
            say(after, number)
        return result

    setattr(owner, name, wrapped)


def die_at(number, folder):
    # Every name on the disk that is opened, made, renamed or removed is announced to an audit hook beforehand.
    calls = 0

    def hook(event, args):
        nonlocal calls
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(folder):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def child():
    say("pid", os.getpid())
    told(Run, "save_checkpoint", after="saved")
    told(module._Training, "_step", before="step")
    told(module.StopSignals, "_note", after="noted")
    if order.get("die_at"):
        die_at(order["die_at"], order["out"])
    if order.get("sleep"):
        module.cosine = lambda *args: (say("asleep", 0), time.sleep(60))
    try:
        module.train(from_dict(order["config"]), order["out"], resume=True, show=False)
    except module.Interrupted as stop:
        say("interrupted", str(stop))
        return stop.exit_code
    except UserError as error:
        say("refused", str(error))
        return 2
    return 0


# Torch imports a second's worth of modules at the first step that it takes; the forks shall have them.
warm = json.loads(sys.stdin.readline())
module.train(from_dict(warm["config"]), warm["out"], show=False)
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = child()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    say("exit", os.waitstatus_to_exitcode(status))
"""


class Server:
    def __init__(self, folder: Path) -> None:
        (folder / "server.py").write_text(SERVER)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(folder / "server.py")]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.orders = 0
        self.order(tiny(folder, steps=1), folder / "warm")

    def order(self, config: RunConfig, out: Path, **rest: object) -> None:
        self.orders += 1
        order = {"number": self.orders, "config": to_dict(config), "out": str(out), **rest}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def start(self, config: RunConfig, out: Path, **rest: object) -> "Child":
        self.order(config, out, **rest)
        return Child(self.process.stdout, self.orders)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=90)


class Child:
    """A process that trains, and what it has said so far."""

    def __init__(self, stream: IO[str], number: int) -> None:
        self.stream, self.number, self.said = stream, number, []
        self.pid = self.wait_for("pid")

    def wait_for(self, what: str, value: object = None) -> object:
        for line in self.stream:
            number, *said = json.loads(line)
            if number != self.number:  # of a child that a failed test has left
                continue
            self.said.append(tuple(said))
            if self.said[-1][0] == what and value in (None, self.said[-1][1]):
                return self.said[-1][1]
            assert self.said[-1][0] != "exit", f"ended without {what} {value}: {self.said}"
        raise AssertionError(f"the server has ended: {self.said}")

    def exit_code(self) -> int:
        return self.wait_for("exit")

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have come to its end
            os.kill(self.pid, number)

    def values(self, what: str) -> list:
        return [value for name, value in self.said if name == what]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[RunConfig, Run]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny(folder, TSAConfig(depth_penalty=0.1), steps=STEPS, dropout=0.1, checkpoint_every=1, eval_every=5)
    return config, train(config, folder / "run", show=False)


def assert_same_result(run: Run, undisturbed: Run) -> None:
    one, other = run.weights(), undisturbed.weights()
    assert {name: array.tobytes() for name, array in one.items()} == {n: a.tobytes() for n, a in other.items()}
    assert steady(run.metrics()) == steady(undisturbed.metrics())


def finish(server: Server, config: RunConfig, out: Path) -> Run:
    child = server.start(config, out)
    assert child.exit_code() == 0, child.said
    return Run.open(out)


def test_kill_9_at_random_moments_loses_nothing(server, undisturbed, tmp_path):
    """RELIABILITY 1: no resume is refused, no saved step is lost, and the weights are the same to the bit."""
    config, expected = undisturbed
    child = server.start(config, tmp_path / "timed")
    start = time.perf_counter()
    assert child.exit_code() == 0, child.said
    whole = time.perf_counter() - start
    assert_same_result(Run.open(tmp_path / "timed"), expected)
    moments, kills, runs = random.Random(0), 0, [tmp_path / "killed-0"]
    while kills < 25:
        child = server.start(config, runs[-1])
        time.sleep(moments.uniform(0, whole))
        child.kill(signal.SIGKILL)
        code = child.exit_code()
        assert child.values("refused") == []
        if code == 0:  # it was faster
            assert_same_result(Run.open(runs[-1]), expected)
            runs.append(tmp_path / f"killed-{len(runs)}")
            continue
        assert code == -signal.SIGKILL, child.said
        kills += 1
        left = Run(runs[-1])
        if not left.finished:
            checkpoint, skipped = left.load_checkpoint()
            assert skipped == []
            assert (checkpoint.step if checkpoint else 0) >= max(child.values("saved"), default=0)
    assert_same_result(finish(server, config, runs[-1]), expected)


def test_kill_9_before_every_single_touch_of_the_disk_loses_nothing(server, undisturbed, tmp_path):
    """Not at random moments but at all of them: a run of three steps is killed before its first, second, ... call."""
    config, _ = undisturbed
    config = replace(config, train=replace(config.train, steps=3, eval_every=2))
    expected = train(config, tmp_path / "expected", show=False)
    refused, number = {}, 0
    while True:
        number += 1
        out = tmp_path / f"killed-{number}"
        child = server.start(config, out, die_at=number)
        code = child.exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL, child.said
        resumed = server.start(config, out)
        if resumed.exit_code() == 0:
            assert_same_result(Run.open(out), expected)
            assert not list(out.rglob(".tmp-*"))
        else:
            refused[number] = resumed.said
    assert number > 50, "the hook does not see the disk"
    assert not refused


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint_and_its_own_code(server, undisturbed, number, tmp_path):
    """RELIABILITY 5. The moment in the step is random: forward, backward, update, validation."""
    config, expected = undisturbed
    config = replace(config, train=replace(config.train, checkpoint_every=1000))
    moments = random.Random(number)
    for attempt, step in enumerate((0, 4, 9, 17)):
        child = server.start(config, tmp_path / str(attempt))
        child.wait_for("step", step)
        time.sleep(moments.uniform(0, 0.02))
        child.kill(number)
        child.wait_for("noted")
        noted = len(child.said)
        assert child.exit_code() == 128 + number, child.said
        (message,) = child.values("interrupted")
        (saved,) = child.values("saved")
        assert number.name in message
        assert f"after step {saved}" in message
        assert "--resume" in message
        assert not [value for name, value in child.said[noted:] if name == "step"], "a step was begun after the signal"
        checkpoint, skipped = Run(tmp_path / str(attempt)).load_checkpoint()
        assert checkpoint is not None
        assert (checkpoint.step, skipped) == (saved, [])
        assert_same_result(finish(server, config, tmp_path / str(attempt)), expected)


def test_stopped_after_every_few_steps_by_either_signal_it_ends_the_same(server, undisturbed, tmp_path):
    config, expected = undisturbed
    config = replace(config, train=replace(config.train, checkpoint_every=1000))
    for step in range(2, STEPS, 6):
        child = server.start(config, tmp_path / "run")
        child.wait_for("step", step)
        child.kill(signal.SIGINT if step % 4 else signal.SIGTERM)
        assert child.exit_code() in (130, 143), child.said
        assert len(list((tmp_path / "run" / "checkpoints").iterdir())) <= 2
    assert_same_result(finish(server, config, tmp_path / "run"), expected)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_sigint_ends_at_once(server, undisturbed, first, tmp_path):
    config, expected = undisturbed
    child = server.start(config, tmp_path / "run", sleep=True)
    child.wait_for("asleep")
    child.kill(first)
    child.wait_for("noted")
    start = time.perf_counter()
    child.kill(signal.SIGINT)
    assert child.exit_code() == 130
    assert time.perf_counter() - start < 5  # its step would have taken a minute
    assert_same_result(finish(server, config, tmp_path / "run"), expected)


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("validation", [1, 2, 4])
def test_a_signal_during_validation_leaves_no_half_number(undisturbed, validation, number, tmp_path):
    """It comes in the first of the batches, and the others are left out; the number over some of them is not kept."""
    config, expected = undisturbed
    real, count = train_module.measure, 0

    def interrupted(model, stream, forward):
        nonlocal count
        count += 1

        def forward_and_signal(ids):
            if count == validation:
                signal.raise_signal(number)
            return forward(ids)

        return real(model, stream, forward_and_signal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "measure", interrupted)
        with pytest.raises(Interrupted) as raised:
            train(config, tmp_path / "run", show=False)
    step = 5 * validation
    assert raised.value.exit_code == 128 + number
    assert f"after step {step}" in one_line(raised.value)
    run = Run(tmp_path / "run")
    assert not run.finished
    assert [row["step"] for row in run.metrics() if "val_loss" in row] == [5 * n for n in range(1, validation)]
    checkpoint, _ = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == step
    assert_same_result(train(config, tmp_path / "run", resume=True, show=False), expected)


def test_a_signal_before_the_first_step_leaves_a_run_that_can_be_resumed(undisturbed, tmp_path):
    config, expected = undisturbed
    real = train_module.build

    def interrupted(config):
        signal.raise_signal(signal.SIGTERM)
        return real(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "build", interrupted)
        with pytest.raises(Interrupted) as raised:
            train(config, tmp_path / "run", show=False)
    assert raised.value.exit_code == 143
    assert_same_result(train(config, tmp_path / "run", resume=True, show=False), expected)


def test_ctrl_c_while_a_corpus_is_loaded_stops_at_once_and_leaves_nothing(tmp_path):
    """There is nothing to save yet, and a download may take minutes."""

    def interrupted(data):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was put off")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module.data, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(tmp_path), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()
