"""The thread that owns the engine: takes jobs from a bounded queue and passes tokens to their listeners.

It also creates the engine, so that no other thread computes on several cores: GNU OpenMP keeps a pool of helpers for
every thread that ever did. If the helpers outnumber the cores, they sleep between a step's hundreds of matrix products,
and waking them takes half as long as the step itself (SmolLM2 on two cores).
"""

import atexit
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from tokendepth.infer.engine import Engine, Request, Token
from tokendepth.serve.metrics import Metrics

End = Literal["stop", "length", "late", "failed"]
"""`late`: timed out before its first token; `failed`: by an internal error."""
Listener = Callable[["Job", Token | None, End | None], None]
"""Called in the worker's thread with every token and with the end."""


class Busy(Exception):
    """The queue is full."""


@dataclass(eq=False)
class Job:
    """A request in the engine."""

    request: Request
    tell: Listener
    deadline: float
    told: int = 0
    """How many of its tokens the listener has received."""


class Worker:
    def __init__(self, make: Callable[[], Engine], *, queue: int, seconds: float, metrics: Metrics) -> None:
        """queue: jobs that may wait in addition to those running. seconds: time limit of a job."""
        self.seconds, self.metrics = seconds, metrics
        self._changed = threading.Condition()
        self._arrived: deque[Job] = deque()
        self._dropped: deque[Job] = deque()
        self._jobs: dict[Request, Job] = {}
        self._open = 0
        """Number of jobs accepted and not ended."""
        self._stopping = False
        self.engine: Engine
        made: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, made), name="engine", daemon=True)
        try:
            self._thread.start()
            made.result()
        except KeyboardInterrupt:
            self._stopping = True
            atexit.register(self._thread.join)  # ending while another thread computes would abort the process
            raise
        self._room = len(self.engine.cache.lengths) + queue

    # -- from any thread

    def submit(self, requests: list[Request], tell: Listener) -> list[Job]:
        """Accept all requests or raise Busy."""
        deadline = time.monotonic() + self.seconds
        jobs = [Job(request, tell, deadline) for request in requests]
        with self._changed:
            if self._stopping or self._open + len(jobs) > self._room:
                raise Busy
            self._open += len(jobs)
            self._arrived.extend(jobs)
            self._changed.notify()
        return jobs

    def cancel(self, jobs: list[Job]) -> None:
        """Cancel jobs that nobody waits for; those that have ended are ignored."""
        with self._changed:
            self._dropped.extend(jobs)
            self._changed.notify()

    def stop(self) -> None:
        """Accept no more jobs, drop the current ones, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def open(self) -> int:
        return self._open

    @property
    def full(self) -> bool:
        """Whether the next job would be rejected."""
        return self._stopping or self._open >= self._room

    # -- in the worker's thread

    def _run(self, make: Callable[[], Engine], made: Future[None]) -> None:
        try:
            self.engine = make()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(None)
        while self._wait():
            self._take_in()
            self._end_late_ones()
            if not self.engine.idle:
                self._step()
            self.metrics.running, self.metrics.waiting = len(self.engine.running), self.engine.waiting

    def _wait(self) -> bool:
        """Wait for something to do; False when stopping."""
        with self._changed:
            while not self._stopping and not self._arrived and not self._dropped and self.engine.idle:
                self._changed.wait()
            return not self._stopping

    def _take_in(self) -> None:
        with self._changed:
            arrived, dropped = list(self._arrived), list(self._dropped)
            self._arrived.clear()
            self._dropped.clear()
        for job in arrived:
            self._jobs[job.request] = job
            self.engine.enqueue(job.request)
        for job in dropped:
            if job.request in self._jobs:
                self.engine.cancel(job.request)
                self._close(job)
                self.metrics.count_dropped()

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline < now]:
            self.engine.cancel(job.request)
            self._close(job)
            job.tell(job, None, "length" if job.request.tokens else "late")

    def _step(self) -> None:
        try:
            grown = self.engine.step()
        except Exception as error:
            log_fault(error)
            for job in list(self._jobs.values()):
                self.engine.cancel(job.request)
                self._close(job)
                job.tell(job, None, "failed")
            return
        written = {request: request.tokens[self._jobs[request].told :] for request in grown}
        self.metrics.count_step(list(written.values()))
        for request, tokens in written.items():
            job, reason = self._jobs[request], request.reason
            assert reason != "cancelled"
            if reason is not None:
                self._close(job)
            job.told += len(tokens)
            for token in tokens[:-1]:
                job.tell(job, token, None)
            job.tell(job, tokens[-1], reason)

    def _close(self, job: Job) -> None:
        del self._jobs[job.request]
        with self._changed:
            self._open -= 1


def log_fault(error: BaseException) -> None:
    """Log where it happened but not its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames[-4:]))
    print(f"tokendepth: {type(error).__name__} at {where}", file=sys.stderr, flush=True)
