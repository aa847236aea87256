"""A process that talks to Ray on behalf of a sweep, because Ray ends or crashes a process whose cluster goes away."""

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokendepth.errors import UserError
from tokendepth.runs.lock import wait_until_free
from tokendepth.training.pool import package_path, start_process

RETRIES = 3
RELEASE_S = 120
"""Seconds to wait for a run to end on a node that seemed dead but was only unreachable."""
LEAVE_S = 10


class RunFailed(Exception):
    """Ray has no exit code for a run; the message says why, for the run's log."""


class Driver:
    """The requests to Ray, made in a separate process."""

    def __init__(self) -> None:
        import ray

        self.ray: Any = ray
        self.results: dict[int, Any] = {}

    def connect(self, address: str) -> str:
        """Join the cluster; returns the address of its head node."""
        self.ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        return self.ray.get_runtime_context().gcs_address

    def nodes(self) -> list[dict[str, float]]:
        """The resources of each live node."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def start(self, cpus: int, gpus: int, *task: Any) -> int:
        execute = self.ray.remote(_execute).options(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)
        self.results[len(self.results)] = execute.remote(*task)
        return len(self.results) - 1

    def poll(self, number: int) -> int | None:
        result = self.results[number]
        if not self.ray.wait([result], timeout=0)[0]:
            return None
        try:
            return self.ray.get(result)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            reason = str(error.cause).strip().rpartition("\n")[2]
            raise RunFailed(f"its node could not start it ({reason}); install there what is installed here") from None
        except self.ray.exceptions.RayError as error:
            name = type(error).__name__
            raise RunFailed(f"Ray has lost it ({name}) and gives up; repeat the command to continue") from None

    def cancel(self, number: int) -> None:
        self.ray.cancel(self.results[number])

    def leave(self) -> None:
        self.ray.shutdown()


class DriverProcess:
    """A `Driver` in a separate process, which ends with this one."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        script = f"from tokendepth.training.ray_driver import answer; answer({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **package_path(), "RAY_USAGE_STATS_ENABLED": "0"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # Ray prints a lot about its nodes
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the sweep
        )
        theirs.close()

    def ask(self, what: str, *words: Any, seconds: float) -> Any:
        """Call the driver's method `what`; raises TimeoutError or EOFError if no answer comes."""
        self.pipe.send((what, words))
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"silent for {seconds} s")
        answer, error = self.pipe.recv()
        if error:
            raise error
        return answer

    def close(self) -> None:
        self.pipe.close()
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def answer(descriptor: int) -> None:
    """Answer requests until the sweep closes its end of the pipe, or dies."""
    pipe, driver = Connection(descriptor), Driver()
    while True:
        try:
            what, words = pipe.recv()
        except EOFError:
            return driver.leave()
        try:
            found = (getattr(driver, what)(*words), None)
        except (UserError, RunFailed) as error:
            found = (None, error)
        except Exception as error:  # Ray's own exceptions may not survive pickling
            found = (None, RuntimeError(" ".join(str(error).split())))
        pipe.send(found)


def _execute(task: dict[str, Any], log: Path, token: Path, environment: dict[str, str], folder: str) -> int:
    """Run on a node what the local pool runs here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # for Ray to cancel tasks; a node may ignore it
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
