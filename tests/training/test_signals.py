"""Every signal that would end a process and can be caught saves first; the others are left alone."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import steady, tiny
from tokendepth.config import RunConfig, TSAConfig
from tokendepth.errors import Interrupted, SweepStopped
from tokendepth.runs.run import Run
from tokendepth.training.loop import train
from tokendepth.training.signals import CRASHES, StopSignals

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
NAMES = {
    name: getattr(signal, name)
    for name in (
        "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGIO", "SIGPWR",
        "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX",
    )
} | {"SIGRTMIN+3": signal.SIGRTMIN + 3}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[RunConfig, Run]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny(folder, TSAConfig(depth_penalty=0.1), steps=STEPS, dropout=0.1, checkpoint_every=1000)
    return config, train(config, folder / "run", show=False)


def assert_same_result(run: Run, undisturbed: Run) -> None:
    one, other = run.weights(), undisturbed.weights()
    assert {name: array.tobytes() for name, array in one.items()} == {n: a.tobytes() for n, a in other.items()}
    assert steady(run.metrics()) == steady(undisturbed.metrics())


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_that_ends_a_process_saves_first(server, undisturbed, name, tmp_path):
    config, expected = undisturbed
    child = server.start(config, tmp_path / "run", action="signal in backward", step=2, signal=NAMES[name])
    assert child.exit_code() == 128 + NAMES[name], child.said
    assert child.values("saved") == [3], "the step in which it came is the last"
    assert child.values("interrupted")[0].startswith(f"{name} after step 3: ")
    assert_same_result(server.finish(config, tmp_path / "run"), expected)


# Sends each signal to a separate process with default actions; prints those that ended it.
ENDING = """
import os, resource, signal, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for number in signal.valid_signals():
    pid = os.fork()
    if pid == 0:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    elif os.WIFSIGNALED(status):
        print(int(number), end=" ")
print()
from tokendepth.training.signals import ending_signals
print(*map(int, ending_signals()))
"""


def test_none_is_forgotten():
    """By experiment: signals that end a process are caught, except crashes and those that Python ignores."""
    done = subprocess.run([sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, check=True)
    ends, caught = (set(map(int, line.split())) for line in done.stdout.splitlines())
    crashes = {getattr(signal, name) for name in CRASHES if hasattr(signal, name)}
    assert ends - caught == crashes | {signal.SIGKILL, signal.SIGPIPE, signal.SIGXFSZ}
    assert not caught - ends
    assert set(NAMES.values()) < caught


@pytest.mark.parametrize("whose", ["ignored", "handler", "faulthandler"])
def test_a_signal_that_somebody_has_a_use_for_is_theirs(whose, tmp_path):
    """`nohup` ignores SIGHUP; Python does not know about a debugger's handler, which is written in C."""
    heard = []
    number = {"ignored": signal.SIGHUP}.get(whose, signal.SIGUSR1)
    with open(tmp_path / "traces", "w") as traces:
        if whose == "faulthandler":
            faulthandler.register(number, file=traces, all_threads=False)
        else:
            before = signal.signal(number, {"ignored": signal.SIG_IGN}.get(whose, lambda *_: heard.append(number)))
        try:
            with StopSignals() as stop:
                signal.raise_signal(number)
            assert stop.received == 0
            signal.raise_signal(number)  # afterwards, too
        finally:
            if whose == "faulthandler":
                faulthandler.unregister(number)
            else:
                signal.signal(number, before)
    assert len(heard) == (2 if whose == "handler" else 0)
    assert (tmp_path / "traces").read_text().count("most recent call first") == (2 if whose == "faulthandler" else 0)


def test_afterwards_every_signal_is_as_it_was():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with StopSignals():
        changed = [number for number in before if signal.getsignal(number) != before[number]]
    assert set(changed) >= set(NAMES.values())
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("first", ["SIGHUP", "SIGQUIT"])
@pytest.mark.parametrize("second", ["SIGINT", "SIGQUIT"])
def test_a_second_one_from_the_keyboard_ends_at_once(server, undisturbed, first, second, tmp_path):
    config, _ = undisturbed
    child = server.start(config, tmp_path / "run", action="sleep", step=0)
    child.wait_for("asleep")
    child.kill(getattr(signal, first))
    child.wait_for("noted")
    start = time.perf_counter()
    child.kill(getattr(signal, second))
    assert child.exit_code() == 128 + getattr(signal, second)
    assert time.perf_counter() - start < 30  # its step would have taken a minute


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 5, signal.SIGUSR2])
def test_a_signal_without_a_name_can_be_told(number):
    name = "SIGUSR2" if number == signal.SIGUSR2 else "SIGRTMIN+5"
    assert str(Interrupted(number, 7, "runs/x")).startswith(f"{name} after step 7: runs/x is saved")
    assert str(SweepStopped(number, "runs")).startswith(f"{name}: every run in runs is saved")
    assert SweepStopped(number, "runs").exit_code == 128 + number


# --- on the command line ----------------------------------------------------------------------------------------------

LINE = "--model.d-model 32 --model.n-layer 3 --model.n-head 4 --model.d-ff 64 --model.context 16 --train.batch-size 4 "
LINE += "--train.device cpu --train.checkpoint-every 1000000 --train.log-every 1 --train.eval-every 1000000 --resume"


def start(prefix: list[str], config: RunConfig, out: Path, steps: int) -> subprocess.Popen:
    line = [*LINE.split(), "--data.corpus", config.data.corpus, "--train.steps", str(steps), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*prefix, "-m", "tokendepth", "train", "demo.tsa", *line]
    return subprocess.Popen(command, cwd=out.parent, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen, run: Run, step: int) -> None:
    deadline = time.monotonic() + 120
    while len(run.metrics()) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_stops_nothing(undisturbed, tmp_path):
    config, _ = undisturbed
    process = start(["nohup", sys.executable], config, tmp_path / "run", steps=200_000)
    run = Run(tmp_path / "run")
    wait_for_step(process, run, 1)
    process.send_signal(signal.SIGHUP)
    wait_for_step(process, run, len(run.metrics()) + 3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "SIGTERM after step" in said
