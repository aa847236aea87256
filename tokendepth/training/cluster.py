"""A pool on a Ray cluster: each run is a Ray task that starts the same process as the local pool, on some node.

The run folder is the only interface: all nodes share it, and the sweep reads a run's progress there. A task whose node
dies is started again on another node, and its run resumes from its last checkpoint.
"""

import io
import math
import os
import signal
import socket
import subprocess
import sys
import time
import types
import uuid
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console

from tokendepth.config import RunConfig
from tokendepth.errors import UserError
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.runs.lock import wait_until_free
from tokendepth.training.pool import Pool, start_process
from tokendepth.training.progress import console

RETRIES = 3
CONNECT_S, LOST_S = 20, 20
"""Seconds for a cluster to answer; Ray itself would try for minutes, or end this process after one."""
RELEASE_S = 120
"""Seconds for a run to end on a node that was taken for dead but was only unreachable."""
VISIBLE_S = 60
"""Seconds until files written by a node are visible here: network file systems are slow."""
LOOK_EVERY_S = 2

CONNECT = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(*str(error).split())
    sys.exit(1)
"""


class RayPool(Pool):
    def __init__(self, address: str, configs: dict[str, RunConfig], workers: int | None, out: Path, show: bool) -> None:
        if address and not _host_and_port(address):
            raise UserError(f"--on is 'ray:{address}'; expected ray:HOST:PORT, or ray for the cluster of this machine")
        self.ray, self.address, self.workers = _ray(), address or "auto", workers or math.inf
        self.name = f"the Ray cluster at {address}" if address else "the Ray cluster of this machine"
        self.devices = {config.train.device for config in configs.values()}
        self.token = out.absolute() / f".shared-{uuid.uuid4().hex}"
        threads = os.environ.get("OMP_NUM_THREADS", "")
        self.cpus = max(1, int(threads)) if threads.isdecimal() else 1
        self.gpus, self.size, self.nodes, self.looked, self.lost = 0, 0, 0, 0.0, False
        self.console = console if show else Console(quiet=True)

    def __enter__(self) -> "RayPool":
        self.console.print(f"connecting to {self.name}", soft_wrap=True)
        with ExitStack() as held:
            with self.console.status("waiting for its answer"):
                self._check_that_it_answers()
            held.enter_context(redirect_stdout(io.StringIO()))  # Ray prints much about its nodes there
            held.callback(self.ray.shutdown)
            self.ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
            self.address, self.answered = self.ray.get_runtime_context().gcs_address, time.monotonic()
            self.gpus = int(self.devices != {"cpu"} and self.ray.cluster_resources().get("GPU", 0) >= 1)
            if "cuda" in self.devices and not self.gpus:
                raise UserError(f"{self.name} has no GPU, but runs have train.device cuda; add a node, or take cpu")
            if not self.room():
                needed = f"{self.cpus} CPU (as OMP_NUM_THREADS says, or 1)" + " and 1 GPU" * self.gpus
                raise UserError(f"{self.name} has no node with {needed}, which a run takes; add one")
            held.callback(self.token.unlink, missing_ok=True)
            write_bytes(self.token, b"every node must see this file\n")
            self.held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    def _check_that_it_answers(self) -> None:
        """First whether anything listens; then by a process that joins, because Ray has no time limit of its own."""
        if self.address != "auto" and (fault := _unreachable(self.address)):
            raise UserError(
                f"{self.name} does not answer ({fault}); is it up, and the address that `ray start` printed?"
            )
        words = [sys.executable, "-c", CONNECT, self.address]
        try:
            done = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=CONNECT_S
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{self.name} did not answer within {CONNECT_S} s; is this machine one of its nodes? "
                "make it one by `ray start --address=HOST:PORT`"
            ) from None
        if done.returncode:
            raise UserError(
                f"{self.name} cannot be joined ({done.stdout.strip()[:300]}); start one by `ray start --head`, "
                "or name its address: --on ray:HOST:PORT"
            )

    def room(self) -> int:
        """As many runs as fit on the current nodes."""
        if time.monotonic() > self.looked + LOOK_EVERY_S:
            self._look()
        return int(min(self.workers, self.size))

    def _look(self) -> None:
        self.looked = time.monotonic()
        if fault := _unreachable(self.address):  # before Ray is asked, which might not return
            self.lost = time.monotonic() > self.answered + LOST_S
            if self.lost:
                raise UserError(
                    f"{self.name} no longer answers ({fault}); every saved step is intact; repeat the command to go on"
                )
            return
        self.answered = time.monotonic()
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        gpus = [node.get("GPU", 0) // self.gpus if self.gpus else math.inf for node in nodes]
        size = sum(int(min(node.get("CPU", 0) // self.cpus, gpu)) for node, gpu in zip(nodes, gpus, strict=True))
        if (size, len(nodes)) != (self.size, self.nodes):
            self.size, self.nodes = size, len(nodes)
            self.console.print(f"nodes: {self.nodes}, runs at a time: {size}", soft_wrap=True)

    def start(self, task: dict[str, Any], log: Path) -> "RayJob":
        gpus = self.gpus if task["config"]["train"]["device"] != "cpu" else 0
        environment = {name: value for name, value in os.environ.items() if name.startswith("TOKENDEPTH_")}
        environment |= {"OMP_NUM_THREADS": str(self.cpus)} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        execute = self.ray.remote(_execute).options(num_cpus=self.cpus, num_gpus=gpus, max_retries=RETRIES)
        return RayJob(self, execute.remote(task, log, self.token, environment, os.getcwd()), task, log)


class RayJob:
    def __init__(self, pool: RayPool, result: Any, task: dict[str, Any], log: Path) -> None:
        self.pool, self.ray, self.result, self.log = pool, pool.ray, result, log
        self.evaluation, self.done = Path(task["folder"]) / "eval.json", 0.0

    def poll(self) -> int | None:
        if not self.ray.wait([self.result], timeout=0)[0]:
            return None
        self.done = self.done or time.monotonic()
        try:
            code = self.ray.get(self.result)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            reason = str(error.cause).strip().rpartition("\n")[2]
            return self._failed(f"its node could not start it ({reason}); install there what is installed here")
        except self.ray.exceptions.RayError as error:
            return self._failed(f"Ray has lost it ({type(error).__name__}) and gives up; repeat the command to go on")
        if code == 0 and not self.evaluation.exists():
            if time.monotonic() < self.done + VISIBLE_S:
                return None
            return self._failed(f"it is finished, but {self.evaluation} is not visible here; repeat the command")
        return code

    def _failed(self, words: str) -> int:
        with disk_faults(self.log), self.log.open("a") as log:
            log.write(words + "\n")
        return 1

    def terminate(self) -> None:
        if not self.pool.lost:
            self.ray.cancel(self.result)

    def communicate(self) -> None:
        if not self.pool.lost:
            self.ray.wait([self.result])


def _execute(task: dict[str, Any], log: Path, token: Path, environment: dict[str, str], folder: str) -> int:
    """Runs on a node: what the local pool does here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray cancels tasks with it; a node may ignore it
    if not token.exists():
        raise UserError(
            f"{socket.gethostname()}, a node of the cluster, does not see {token.parent}; "
            "choose an --out that all nodes share under the same path"
        )
    if log.exists():  # this is not the first attempt
        wait_until_free(Path(task["folder"]), RELEASE_S)
    process = start_process(task, log, environment, folder if os.path.isdir(folder) else None)
    try:
        while process.poll() is None:  # not wait(): Ray's interrupt arrives between Python instructions only
            time.sleep(0.2)
    finally:
        process.terminate()
        process.communicate()
    return process.returncode


def _ray() -> types.ModuleType:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs the package ray, not installed; pip install 'tokendepth[cluster]'") from None
    return ray


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and int(port) < 2**16 else None


def _unreachable(address: str) -> str:
    """Why `address` cannot be reached; empty if it can."""
    try:
        socket.create_connection(_host_and_port(address) or ("", 0), timeout=5).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""
