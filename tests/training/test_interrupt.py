"""Processes that are killed or asked to stop: a resumed run ends bit for bit the same.

The fault-injection suite kills at random moments; here it is at every call, and at moments that chance would miss.
"""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import one_line, steady, tiny
from tokendepth.config import RunConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.runs.run import Run
from tokendepth.training import loop as train_module
from tokendepth.training.loop import Interrupted, train
from tokendepth.training.signals import StopSignals

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 20


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[RunConfig, Run]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny(folder, TSAConfig(depth_penalty=0.1), steps=STEPS, dropout=0.1, checkpoint_every=1, eval_every=5)
    return config, train(config, folder / "run", show=False)


def assert_same_result(run: Run, undisturbed: Run) -> None:
    one, other = run.weights(), undisturbed.weights()
    assert {name: array.tobytes() for name, array in one.items()} == {n: a.tobytes() for n, a in other.items()}
    assert steady(run.metrics()) == steady(undisturbed.metrics())


@pytest.mark.slow
def test_kill_9_before_every_single_touch_of_the_disk_loses_nothing(server, undisturbed, tmp_path):
    """At every moment instead of random ones: a two-step run is killed before its first, second, ... call."""
    config, _ = undisturbed
    config = replace(config, train=replace(config.train, steps=2, eval_every=2))
    expected = train(config, tmp_path / "expected", show=False)
    refused, number = {}, 0
    while True:
        number += 1
        out = tmp_path / f"killed-{number}"
        child = server.start(config, out, kill_at_call=number)
        code = child.exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL, child.said
        try:
            assert_same_result(train(config, out, resume=True, show=False), expected)
            assert not list(out.rglob(".tmp-*"))
        except UserError as refusal:
            refused[number] = refusal
    assert number > 50, "the hook does not see the disk"
    assert not refused


def test_stopped_after_every_few_steps_by_either_signal_it_ends_the_same(server, undisturbed, tmp_path):
    config, expected = undisturbed
    config = replace(config, train=replace(config.train, checkpoint_every=1000))
    for step in range(2, STEPS, 6):
        child = server.start(config, tmp_path / "run")
        child.wait_for("step", step)
        child.kill(signal.SIGINT if step % 4 else signal.SIGTERM)
        assert child.exit_code() in (130, 143), child.said
        assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) <= 2
    assert_same_result(server.finish(config, tmp_path / "run"), expected)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_sigint_ends_at_once(server, undisturbed, first, tmp_path):
    config, expected = undisturbed
    child = server.start(config, tmp_path / "run", action="sleep", step=0)
    child.wait_for("asleep")
    child.kill(first)
    child.wait_for("noted")
    start = time.perf_counter()
    child.kill(signal.SIGINT)
    assert child.exit_code() == 130
    assert time.perf_counter() - start < 5  # its step would have taken a minute
    assert_same_result(server.finish(config, tmp_path / "run"), expected)


def test_a_second_sigint_ends_at_once_also_inside_one_long_instruction(tmp_path):
    """To Python a backward pass is one instruction, and handlers wait for its end; here it is a hash of many rounds."""
    script = (
        "import hashlib; from tokendepth.training.loop import StopSignals\n"
        "with StopSignals(): print('in', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 500_000_000)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        time.sleep(0.2)  # into the hash
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)  # the first one only requests a stop
        child.send_signal(signal.SIGINT)
        assert child.wait(5) == 130


def test_after_training_signals_are_as_they_were():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()
    descriptor = signal.set_wakeup_fd(-1)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert signal.set_wakeup_fd(-1) == -1
    signal.set_wakeup_fd(descriptor)
    deadline = time.perf_counter() + 5
    while threading.active_count() > before[2] and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()) == before


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("validation", [1, 2, 4])
def test_a_signal_during_validation_leaves_no_half_number(undisturbed, validation, number, tmp_path):
    """The signal comes in the first batch and the others are left out; the loss over only some of them is not kept."""
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
    real = train_module.start

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "start", interrupted)
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
