"""Two torchrun launchers, as on two machines: a rank dies, then a launcher with its rank, and both are replaced."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults.commands import train_words
from benchmarks.faults.ports import free_port
from tests.processes import is_alive, saved_step, wait_until
from tests.tiny import hashes, steady, tiny
from tokendepth.config import RunConfig
from tokendepth.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path) -> RunConfig:
    small = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_ff": 16, "dropout": 0.1}
    return replace(tiny(tmp_path, **small, steps=200, eval_every=50, checkpoint_every=10), recipe="demo.tsa")


@pytest.fixture
def launch(config, tmp_path) -> Iterator[Callable[[str], subprocess.Popen]]:
    # Without the variable, launchers that restarted a different number of times do not find each other.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launched = []

    def torchrun(how: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "torch.distributed.run", *how.split()]
        words += ["-m", "tokendepth", *train_words(config, tmp_path / "run")]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        launched.append(subprocess.Popen(words, cwd=tmp_path, env=environment, **quiet))
        return launched[-1]

    yield torchrun
    for launcher in launched:
        launcher.terminate()  # it ends its ranks
        launcher.wait(60)


def ranks(launcher: subprocess.Popen) -> list[int]:
    return [int(word) for word in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_after_one_of_two_launchers_died_another_joins_and_the_run_ends_in_the_same_bits(
    server, config, launch, tmp_path
):
    port = free_port()
    how = f"--nnodes 2 --nproc-per-node 1 --max-restarts 2 --rdzv-backend c10d --rdzv-endpoint localhost:{port}"
    how += " --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=5"  # a launcher silent for 5 s is dead
    run = Run(tmp_path / "run")
    first = launch(how)
    wait_until(lambda: listens(port))  # it hosts the rendezvous, without which nobody could join
    second = launch(how)
    wait_until(lambda: saved_step(run))
    (rank,) = ranks(second)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: ranks(second) not in ([], [rank]))  # both launchers restart their ranks
    saved = saved_step(run)
    wait_until(lambda: saved_step(run) > saved)
    lost = [second.pid, *ranks(second)]
    assert len(lost) == 2
    for process in lost:
        os.kill(process, signal.SIGKILL)
    second.wait(60)
    wait_until(lambda: not any(map(is_alive, lost)))
    assert not run.finished
    third = launch(how)
    undisturbed = server.finish(config, tmp_path / "undisturbed", do="together", world=2)
    assert (first.wait(120), third.wait(120)) == (0, 0)
    assert run.env["ranks"] == 2
    assert steady(run.metrics()) == steady(undisturbed.metrics())
    assert hashes(run.path)["model.safetensors"] == hashes(undisturbed.path)["model.safetensors"]


def listens(port: int) -> bool:
    with socket.socket() as asker:
        return asker.connect_ex(("localhost", port)) == 0
