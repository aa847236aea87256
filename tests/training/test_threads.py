"""A resumed run goes on with the CPU threads it began with: sums are cut by their number."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.faults.stopped import stopped_run
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
    """Else the tests below would show nothing."""
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
        f"{run.path}: it goes on with the {begun} CPU threads it began with, not with {here}: the result is the same"
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
    assert "did not note its CPU threads: the result may differ in its last bits" in capsys.readouterr().err


def test_threads_that_cannot_be_had_are_told(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert module.keep_threads(7, 1) == (
        "it began with 7 CPU threads and PyTorch keeps to 1: the result will differ in its last bits"
    )


@pytest.mark.parametrize("begun", [None, 0, -1, "2", True, 2.0], ids=str)
def test_what_is_no_number_of_threads_is_none(begun):
    torch.set_num_threads(2)
    assert module.keep_threads(begun, 1) is None
    assert torch.get_num_threads() == 1


# --- as it is typed ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")  # as test_launchers.py
def test_another_omp_num_threads_changes_no_bit(tmp_path):
    """torchrun sets it to 1, where a user has not."""
    corpus, steps = tiny(tmp_path).data.corpus, 60
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = "-m tokendepth train demo.tsa --model.d-model 32 --model.n-layer 3 --model.n-head 4 --model.d-ff 64 "
    line += "--model.context 16 --train.batch-size 4 --train.device cpu --train.checkpoint-every 10000 "
    line += f"--train.eval-every 10000 --train.log-every 1 --train.steps {steps} --data.corpus {corpus} --resume --out"

    def start(name: str, threads: int | None) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}  # there are more threads than cores
        environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        command = [*launch, *line.split(), name]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    undisturbed = start("undisturbed", 2)
    _, said = undisturbed.communicate(timeout=120)
    assert undisturbed.returncode == 0, said
    stopped, run = start("run", 2), Run(tmp_path / "run")
    while stopped.poll() is None and not run.metrics():
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=120)
    assert "SIGTERM after step" in said
    resumed = start("run", None)
    _, said = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    assert said.count("it goes on with the 2 CPU threads it began with, not with 1") == 1
    assert weights(run) == weights(Run(tmp_path / "undisturbed"))
