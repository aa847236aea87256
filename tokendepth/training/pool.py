"""Starts the runs of a sweep, each in its own process on this machine (cluster.py: on a Ray cluster)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from tokendepth.config import RunConfig
from tokendepth.runs.files import disk_faults

GPU_WORKERS = 8
"""Enough to keep one GPU busy with small models: 11 s of training come with 30 s to start, compile and evaluate."""


class Job(Protocol):
    """A run in progress; on this machine a `subprocess.Popen`."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to save and stop."""
        ...

    def communicate(self) -> object:
        """Wait until it has ended."""
        ...


class Pool:
    """A context manager that starts runs."""

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def room(self) -> int:
        """Maximum number of concurrent runs."""
        raise NotImplementedError

    def start(self, task: dict[str, Any], log: Path) -> Job:
        """Start the run described by `task`. Its output goes to `log`, which exists once the run has started."""
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
    """Start a worker on this machine, in `folder`; `environment` is added to this process's own."""
    with disk_faults(log), log.open("w") as words:
        return subprocess.Popen(
            [sys.executable, "-m", "tokendepth.training.sweep", json.dumps(task)],
            cwd=folder,
            env={**os.environ, **package_path(), **environment},
            stdin=subprocess.PIPE,  # never written to; it closes when the sweep ends, and the worker notices
            stdout=words,
            stderr=words,
            start_new_session=True,  # Ctrl-C reaches only the sweep, which then asks its workers to stop
        )


def package_path() -> dict[str, str]:
    """Environment variables that let a subprocess import this package even if it is not installed."""
    package = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
