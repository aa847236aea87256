"""Where the runs of a sweep are trained: each in a process of its own, on this machine (cluster.py: on many)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from tokendepth.config import RunConfig
from tokendepth.runs.files import disk_faults

GPU_WORKERS = 8
"""Enough small models to keep one GPU busy: a run that trains for 11 s takes 30 more to start, compile and evaluate."""


class Job(Protocol):
    """A run under way; on this machine `subprocess.Popen` itself."""

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        ...

    def terminate(self) -> None:
        """Ask it to save what it has and to end."""
        ...

    def communicate(self) -> object:
        """Wait for its end."""
        ...


class Pool:
    """Takes runs while it is entered."""

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def room(self) -> int:
        """How many runs there may be at a time."""
        raise NotImplementedError

    def start(self, task: dict[str, Any], log: Path) -> Job:
        """Begin the run that `task` describes. What its process prints goes to `log`, which is there once it runs."""
        raise NotImplementedError


class LocalPool(Pool):
    def __init__(self, configs: dict[str, RunConfig], workers: int | None) -> None:
        self.workers = workers or _default_workers(configs)

    def room(self) -> int:
        return self.workers

    def start(self, task: dict[str, Any], log: Path) -> subprocess.Popen:
        threads = str(max(1, (os.cpu_count() or 1) // self.workers))
        return start_process(task, log, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)})


def _default_workers(configs: dict[str, RunConfig]) -> int:
    import torch

    on_gpu = torch.cuda.is_available() and any(c.train.device != "cpu" for c in configs.values())
    return min(GPU_WORKERS, max(1, (os.cpu_count() or 2) // 2)) if on_gpu else 1


def start_process(
    task: dict[str, Any], log: Path, environment: dict[str, str], folder: str | None = None
) -> subprocess.Popen:
    """A worker on this machine, in `folder`, with `environment` beside this process's own."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with disk_faults(log), log.open("w") as words:
        return subprocess.Popen(
            [sys.executable, "-m", "tokendepth.training.sweep", json.dumps(task)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,  # never written to: its end is the sweep's
            stdout=words,
            stderr=words,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its workers to stop
        )
