"""More clients than the server has room for: all at once, for a long time, and connections that ask for nothing."""

import contextlib
import random
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.faults import servers
from benchmarks.faults.malformed import is_shaped
from benchmarks.faults.outcome import Outcome, Tell
from benchmarks.faults.servers import AT_ONCE_S, SLACK_S, Answer, Served, expected, is_closed, sent
from tokendepth.serve import server

ROOMS = ((8, 16), (1, 4))
"""Slots, and places in the queue."""
ROUNDS = 3
MB = 2**20
FLAT = 32 * MB
"""By which memory may grow after the first round: buffers of threads and connections, not of requests."""


def overload(folder: Path, count: int, tell: Tell) -> Outcome:
    """`count` clients at the same moment, several times over, half of them streaming."""
    outcome, run = Outcome(), servers.run_to_serve(folder)
    slowest, accepted, grown = 0.0, 0, 0
    for slots, queue in ROOMS:
        name = f"{slots} slots, a queue of {queue}"
        with servers.serving(run, "--slots", str(slots), "--queue", str(queue)) as served:
            served.complete(max_tokens=1)
            first = 0
            for _ in range(ROUNDS):
                with outcome.guard(name):
                    answers, most = _all_at_once(served, count, outcome)
                    outcome.check(most <= slots + queue, f"{name}: {most} requests ran or waited at once")
                    good = [answer for answer in answers if answer.status == 200]
                    refused = [answer for answer in answers if answer.status != 200]
                    least = min(count, slots + queue)
                    outcome.check(len(good) >= least, f"{name}: {len(good)} were accepted, there was room for {least}")
                    _check_good(outcome, name, good, expected(run.path, servers.TOKENS))
                    for answer in refused:
                        clear = answer.status == 429 and is_shaped(answer.content) and "retry-after" in answer.headers
                        outcome.check(clear, f"{name}: refused by {answer.status} {answer.content[:100]!r}")
                        outcome.check(answer.seconds <= AT_ONCE_S, f"{name}: a refusal took {answer.seconds:.2f} s")
                    free = served.seconds_until(0)
                    outcome.check(free <= AT_ONCE_S, f"{name}: a slot was taken for {free:.2f} s")
                    slowest = max([slowest, *(answer.seconds for answer in refused)])
                    accepted += len(good)
                    first = first or served.memory
                    grown = max(grown, served.memory - first)
                outcome.attempts += count
                tell(outcome.attempts, len(ROOMS) * ROUNDS * count)
        outcome.check(grown <= FLAT, f"{name}: memory grew by {grown / MB:.0f} MB")
    outcome.figures = {"accepted": accepted, "slowest refusal, s": slowest, "memory growth, MB": round(grown / MB, 1)}
    return outcome


def _all_at_once(served: Served, count: int, outcome: Outcome) -> tuple[list[Answer], int]:
    """Their answers, and how many of them ran or waited at the same time at the most."""
    gate, done = threading.Barrier(count), threading.Event()

    def ask(number: int) -> Answer:
        gate.wait()
        return served.complete(stream=number % 2 == 1)

    def watch() -> int:
        most = 0
        while not done.wait(0.05):
            outcome.check(served.healthy(), "the health is not 200 within a second")
            most = max(most, served.open)
        return most

    with ThreadPoolExecutor(count + 1) as pool:
        watching = pool.submit(watch)
        try:
            answers = list(pool.map(ask, range(count)))
        finally:
            done.set()
        return answers, watching.result()


def _check_good(outcome: Outcome, name: str, answers: list[Answer], text: str) -> None:
    for answer in answers:
        try:
            outcome.check(answer.text == text, f"{name}: an accepted request got another text")
        except ValueError as error:
            outcome.check(False, f"{name}: {error}")


# --- for a long time --------------------------------------------------------------------------------------------------

RATE = 1.0
"""Requests a second."""
SOAK_TOKENS = 60


def soak(folder: Path, count: int, tell: Tell) -> Outcome:
    """One request a second, for as many seconds as `count`: whole, streamed, malformed, or left by its client."""
    outcome, run, dice = Outcome(), servers.run_to_serve(folder), random.Random(0)
    text, sizes = expected(run.path, SOAK_TOKENS), []
    with servers.serving(run) as served:
        start = time.monotonic()
        for number in range(count):
            with outcome.attempt(f"request {number}"):
                kind = dice.choice(("whole", "stream", "wrong", "gone"))
                if kind == "gone":
                    with served.connect() as client:
                        sent(client, stream=True)
                        client.recv(10)
                elif kind == "wrong":
                    outcome.check(served.complete(max_tokens=-1).status == 400, "a wrong request was not refused")
                else:
                    answer = served.complete(max_tokens=SOAK_TOKENS, stream=kind == "stream")
                    _check_good(outcome, kind, [answer], text)
                sizes.append(served.memory)
            tell(number + 1, count)
            time.sleep(max(0.0, start + (number + 1) / RATE - time.monotonic()))
        outcome.check(served.healthy(), "the health is not 200")
        free = served.seconds_until(0)
        outcome.check(free <= AT_ONCE_S, f"a slot was taken for {free:.2f} s")
        minutes = (time.monotonic() - start) / 60
    quarter = max(1, len(sizes) // 4)
    grown = max(sizes[-quarter:], default=0) - max(sizes[:quarter], default=0)
    outcome.check(grown <= FLAT, f"memory grew by {grown / MB:.0f} MB")
    outcome.figures = {"minutes": round(minutes, 1), "memory growth, MB": round(grown / MB, 1)}
    return outcome


# --- connections that ask for nothing ---------------------------------------------------------------------------------

REQUESTS_AMONG_THEM = 20


def connections(folder: Path, count: int, tell: Tell) -> Outcome:
    """`count` idle connections: others are served as before, and the idle ones are closed when their time is up."""
    outcome, run = Outcome(), servers.run_to_serve(folder)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # of this process: each is one of its files, too
    text = expected(run.path, SOAK_TOKENS)
    with servers.serving(run) as served, contextlib.ExitStack() as stack:
        served.complete(max_tokens=SOAK_TOKENS)
        before, start = served.memory, time.monotonic()
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(served.connect()))
            outcome.attempts += 1
            tell(outcome.attempts, count)
        opened = time.monotonic() - start
        slowest = 0.0
        for _ in range(REQUESTS_AMONG_THEM):
            health = served.ask("GET", "/health")
            outcome.check(health.status == 200, f"the health is {health.status}")
            slowest = max(slowest, health.seconds)
            _check_good(outcome, "among idle ones", [served.complete(max_tokens=SOAK_TOKENS)], text)
        outcome.check(slowest <= AT_ONCE_S, f"the health took {slowest:.2f} s")
        grown = served.memory - before
        last = time.monotonic() + server.IDLE_SECONDS + SLACK_S
        while (left := [client for client in clients if not is_closed(client)]) and time.monotonic() < last:
            time.sleep(0.5)
        outcome.check(not left, f"{len(left)} of {count} idle connections are still open")
        outcome.check(served.healthy(), "the health is not 200 afterwards")
    outcome.figures = {
        "seconds to open them": round(opened, 1),
        "slowest health, s": slowest,
        "memory growth, MB": round(grown / MB, 1),
    }
    return outcome
