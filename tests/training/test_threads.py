"""A resumed run keeps the number of CPU threads it began with, over which sums are split."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.faults.commands import train_words
from benchmarks.faults.stopped import stopped_run
from tests.processes import wait_until
from tests.tiny import tiny
from tokendepth.config import RunConfig
from tokendepth.runs.run import Run
from tokendepth.training import threads as module
from tokendepth.training.loop import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(run: Run) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in run.weights().items()}


def trained(config: RunConfig, out: Path, number: int) -> Run:
    torch.set_num_threads(number)
    return train(config, out, show=False)


def test_the_number_of_threads_decides_about_the_last_bits(tmp_path):
    """Otherwise the tests below would prove nothing."""
    config = tiny(tmp_path)
    one, two, again = (trained(config, tmp_path / name, int(name[0])) for name in ("1", "2", "2-again"))
    assert weights(one) != weights(two)
    assert weights(two) == weights(again)


@pytest.mark.parametrize(("begun", "here"), [(2, 1), (1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("step", [0, 5], ids=["before its first checkpoint", "after it"])
def test_a_resumed_run_keeps_the_threads_it_began_with(begun, here, step, tmp_path, capsys):
    config = tiny(tmp_path)
    undisturbed = trained(config, tmp_path / "undisturbed", begun)
    run = stopped_run(config, tmp_path / "run", step)
    assert run.env["threads"] == begun
    torch.set_num_threads(here)
    assert weights(train(config, run.path, resume=True)) == weights(undisturbed)
    assert torch.get_num_threads() == here, "as it was, once it is done"
    assert run.env["threads"] == begun
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "CPU threads" in line]
    assert line == (
        f"{run.path}: it continues with the {begun} CPU threads it began with, not {here}: the result is the same"
    )


def test_where_the_number_is_the_same_nothing_is_said(tmp_path, capsys):
    config = tiny(tmp_path)
    run = stopped_run(config, tmp_path / "run", 5)
    train(config, run.path, resume=True)
    assert "threads" not in capsys.readouterr().err


def test_an_older_run_that_did_not_note_its_threads_says_so(tmp_path, capsys, monkeypatch):
    config = tiny(tmp_path)
    with monkeypatch.context() as patch:
        real = json.dumps
        patch.setattr(
            "tokendepth.training.loop.json_bytes",
            lambda tree: real({key: value for key, value in tree.items() if key != "threads"}).encode(),
        )
        run = stopped_run(config, tmp_path / "run", 5)
    assert "threads" not in run.env
    assert train(config, run.path, resume=True).finished
    assert "did not record its CPU threads: its last bits may differ" in capsys.readouterr().err


def test_threads_that_cannot_be_had_are_told(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert module.keep_threads(7, 1) == (
        "it began with 7 CPU threads, but PyTorch uses 1: the last bits of the result will differ"
    )


@pytest.mark.parametrize("begun", [None, 0, -1, "2", True, 2.0], ids=str)
def test_what_is_no_number_of_threads_is_none(begun):
    torch.set_num_threads(2)
    assert module.keep_threads(begun, 1) is None
    assert torch.get_num_threads() == 1


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_ranks_stop_at_the_same_step_and_go_on_in_the_same_bits_with_another_omp_num_threads(server, tmp_path):
    """First only the second rank is asked to stop, then torchrun, which asks both and sets the variable to 1."""
    config = replace(tiny(tmp_path, steps=150, eval_every=10_000, checkpoint_every=10_000), recipe="demo.tsa")
    run, torchrun = Run(tmp_path / "run"), ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def start(**threads: str) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}  # there are more threads than cores
        command = [sys.executable, *torchrun, "-m", "tokendepth", *train_words(config, run.path)]
        return subprocess.Popen(command, env={**environment, **threads}, stderr=subprocess.PIPE, text=True)

    def stopped(process: subprocess.Popen, name: str, ask: Callable[[], None]) -> str:
        """Ask it to stop once it has resumed; returns its output."""
        before = len(run.metrics())
        wait_until(lambda: len(run.metrics()) > before or process.poll() is not None)
        ask()
        _, said = process.communicate(timeout=120)
        (step,) = re.findall(rf"^tokendepth: {name} after step (\d+): ", said, re.MULTILINE)
        checkpoint, _ = run.load_checkpoint()
        assert checkpoint is not None
        assert checkpoint.step == int(step) > before
        assert str(ROOT / "tokendepth") not in said, "torchrun has a traceback of its own, we have none"
        return said

    first = start(OMP_NUM_THREADS="2")
    stopped(first, "SIGHUP", lambda: os.kill(second_rank(first), signal.SIGHUP))
    again = start()
    said = stopped(again, "SIGTERM", again.terminate)
    assert said.count("it continues with the 2 CPU threads it began with, not 1") == 1
    undisturbed = server.finish(config, tmp_path / "undisturbed", do="together", world=2, threads=2)
    assert weights(server.finish(config, run.path, do="together", world=2)) == weights(undisturbed)


def second_rank(torchrun: subprocess.Popen) -> int:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    (found,) = [child for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]
    return int(found)
