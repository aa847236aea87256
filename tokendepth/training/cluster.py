"""A pool on a Ray cluster: each run is a Ray task that starts the same worker process as the local pool.

The run folder is the only interface: all nodes share it, and the sweep reads the progress from it. If a node dies, Ray
starts its tasks again on another node, and their runs resume from their last checkpoints.
"""

import math
import os
import socket
import time
import uuid
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from tokendepth.config import RunConfig
from tokendepth.errors import UserError
from tokendepth.runs.files import disk_faults, write_bytes
from tokendepth.training.pool import Pool
from tokendepth.training.progress import console
from tokendepth.training.ray_driver import DriverProcess, RunFailed

CONNECT_S, LOST_S = 30, 20
"""Timeouts in seconds, for connecting and for every later request; Ray itself would retry for minutes."""
VISIBLE_S = 60
"""Seconds to wait for a file written by a node to become visible here; network file systems can lag."""
LOOK_EVERY_S = 2
ENDED = "Ray's process has ended"


class RayPool(Pool):
    driver: DriverProcess

    def __init__(self, address: str, configs: dict[str, RunConfig], workers: int | None, out: Path, show: bool) -> None:
        if address and not _host_and_port(address):
            raise UserError(f"--on is 'ray:{address}'; expected ray:HOST:PORT, or ray for the cluster of this machine")
        if not find_spec("ray"):
            raise UserError("--on ray needs the package ray, not installed; pip install 'tokendepth[cluster]'")
        self.address, self.workers = address or "auto", workers or math.inf
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
                self._connect(held)
            has_gpu = any(node.get("GPU", 0) >= 1 for node in self.ask("nodes"))
            self.gpus = int(self.devices != {"cpu"} and has_gpu)
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

    def _connect(self, held: ExitStack) -> None:
        if self.address != "auto" and (fault := _unreachable(self.address)):
            raise UserError(
                f"{self.name} does not answer ({fault}); is it up, and the address that `ray start` printed?"
            )
        self.driver = DriverProcess()
        held.callback(self._leave)
        try:
            self.address = self.driver.ask("connect", self.address, seconds=CONNECT_S)
        except TimeoutError:
            self.lost = True
            raise UserError(
                f"{self.name} did not answer within {CONNECT_S} s; is this machine one of its nodes? "
                "make it one by `ray start --address=HOST:PORT`"
            ) from None
        except (RuntimeError, EOFError, BrokenPipeError) as error:
            raise UserError(
                f"{self.name} cannot be joined ({str(error)[:300] or ENDED}); start one by `ray start --head`, "
                "or name its address: --on ray:HOST:PORT"
            ) from None
        self.answered = time.monotonic()

    def _leave(self) -> None:
        if self.lost:
            self.driver.process.kill()  # it is blocked on a head node that does not answer
        self.driver.close()

    def ask(self, what: str, *words: Any) -> Any:
        try:
            return self.driver.ask(what, *words, seconds=LOST_S)
        except (RuntimeError, TimeoutError, EOFError, BrokenPipeError) as error:
            self._give_up(str(error) or ENDED)

    def _give_up(self, fault: str) -> NoReturn:
        self.lost = True
        raise UserError(
            f"{self.name} no longer answers ({fault}); every saved step is intact; repeat the command to continue"
        )

    def room(self) -> int:
        """How many runs fit on the current nodes, at most `workers`."""
        if time.monotonic() > self.looked + LOOK_EVERY_S:
            self._look()
        return int(min(self.workers, self.size))

    def _look(self) -> None:
        self.looked = time.monotonic()
        if fault := _unreachable(self.address):  # checked first, because a call to Ray might never return
            if time.monotonic() > self.answered + LOST_S:
                self._give_up(fault)
            return
        self.answered = time.monotonic()
        nodes = self.ask("nodes")
        gpus = [node.get("GPU", 0) // self.gpus if self.gpus else math.inf for node in nodes]
        size = sum(int(min(node.get("CPU", 0) // self.cpus, gpu)) for node, gpu in zip(nodes, gpus, strict=True))
        if (size, len(nodes)) != (self.size, self.nodes):
            self.size, self.nodes = size, len(nodes)
            self.console.print(f"nodes: {self.nodes}, runs at a time: {size}", soft_wrap=True)

    def start(self, task: dict[str, Any], log: Path) -> "RayJob":
        gpus = self.gpus if task["config"]["train"]["device"] != "cpu" else 0
        environment = {name: value for name, value in os.environ.items() if name.startswith("TOKENDEPTH_")}
        environment |= {"OMP_NUM_THREADS": str(self.cpus)} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
        number = self.ask("start", self.cpus, gpus, task, log, self.token, environment, os.getcwd())
        return RayJob(self, number, task, log)


class RayJob:
    def __init__(self, pool: RayPool, number: int, task: dict[str, Any], log: Path) -> None:
        self.pool, self.number, self.log = pool, number, log
        self.evaluation, self.done = Path(task["folder"]) / "eval.json", 0.0

    def poll(self) -> int | None:
        try:
            code = self.pool.ask("poll", self.number)
        except RunFailed as failure:
            return self._failed(str(failure))
        if code is None:
            return None
        self.done = self.done or time.monotonic()
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
            self.pool.ask("cancel", self.number)

    def communicate(self) -> None:
        with suppress(RunFailed, UserError):
            while not self.pool.lost and self.pool.ask("poll", self.number) is None:
                time.sleep(0.1)


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
