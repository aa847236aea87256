"""Memory that is kept for the next step, and returned when the work is done; and the commit that numbers are of."""

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny
from tokendepth.runs import machine
from tokendepth.training import loop

ROOT = Path(__file__).resolve().parents[2]

RESIDENT = """
import torch
from tokendepth.runs.machine import freed_memory_kept, keep_freed_memory

def megabytes():
    torch.ones(64 * 2**20)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20

cpu, found = torch.device("cpu"), [megabytes()]
with freed_memory_kept(cpu):
    found.append(megabytes())
    with freed_memory_kept(cpu):
        pass
    found.append(megabytes())
found.append(megabytes())
with freed_memory_kept(torch.device("cuda")):
    found.append(megabytes())
with freed_memory_kept(cpu):
    keep_freed_memory()
found.append(megabytes())
first = found[0]
print([found_here - first > 200 for found_here in found])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_kept_within_and_then_returned():
    """256 MiB: within, also after another has ended within it; and for good where that was asked for."""
    run = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([False, True, True, False, False, True])


def test_training_keeps_it_while_it_trains(tmp_path, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def kept(device):
        seen.append(device)
        yield
        seen.append((tmp_path / "run" / "model.safetensors").exists())

    monkeypatch.setattr(loop, "freed_memory_kept", kept)
    loop.train(tiny(tmp_path, steps=2), tmp_path / "run", show=False)
    assert seen == [torch.device("cpu"), True]


def test_the_commit_is_that_of_the_checkout_or_the_one_that_is_told(monkeypatch):
    assert machine.commit() == os.environ["TOKENDEPTH_COMMIT"], "as tests/conftest.py tells it"
    monkeypatch.delenv("TOKENDEPTH_COMMIT")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip() if (ROOT / ".git").exists() else ""
    assert machine.commit().removesuffix("+changes") == (head or "unknown")
