"""Memory that is kept for the next step and returned after the work; and the commit recorded with results."""

import contextlib
import platform
import subprocess
import sys

import pytest
import torch

from tests.tiny import tiny
from tokendepth.runs import machine
from tokendepth.training import loop

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
    """256 MiB are kept inside the block, even after a nested one has ended, and permanently if requested."""
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


def test_memory_is_what_the_container_allows(tmp_path, monkeypatch):
    limits, cpu = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"], torch.device("cpu")
    monkeypatch.setattr(machine, "CONTAINER_LIMITS", tuple(map(str, limits)))
    whole = machine.memory_bytes(cpu)
    assert whole > 2**20, "no such files"
    limits[0].write_text("max\n")
    assert machine.memory_bytes(cpu) == whole
    limits[1].write_text(f"{2**62}\n")
    assert machine.memory_bytes(cpu) == whole
    limits[0].write_text(f"{2**20}\n")
    assert machine.memory_bytes(cpu) == 2**20


def test_the_commit_is_that_of_the_package_or_the_one_that_is_told(tmp_path, monkeypatch):
    package = tmp_path / "package" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    monkeypatch.setattr(machine.tokendepth, "__file__", str(package))
    monkeypatch.setenv("TOKENDEPTH_COMMIT", "told")
    assert machine.commit() == "told"
    monkeypatch.delenv("TOKENDEPTH_COMMIT")
    assert machine.commit() == "unknown", "no checkout"

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "of something else")
    assert machine.commit() == "unknown", "installed inside another checkout"
    git("add", "package")
    git("commit", "--quiet", "--message", "the package")
    assert machine.commit() == git("rev-parse", "--short=12", "HEAD")
    package.write_text("edited")
    assert machine.commit() == git("rev-parse", "--short=12", "HEAD") + "+changes"
