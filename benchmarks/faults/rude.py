"""Clients that disconnect, are slow, never end or never read; and a server that is killed or stopped under load."""

import contextlib
import http.client
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import servers
from benchmarks.faults.malformed import is_shaped
from benchmarks.faults.outcome import Outcome, Tell
from benchmarks.faults.servers import AT_ONCE_S, SLACK_S, Served, expected, head, is_closed, sent
from tokendepth.runs.run import Run
from tokendepth.serve import connections, guard, server

MORE_THAN_BUFFERS = 64 * 2**20
"""Bytes that the kernel does not keep for a connection that nobody reads from."""
SLOW_READERS = 2
Rudeness = Callable[[Served, Outcome], None]


def _gone_in_a_stream(served: Served, outcome: Outcome) -> None:
    with served.connect() as client:
        sent(client, stream=True)
        outcome.check(client.recv(12) == b"HTTP/1.1 200", "a stream did not begin")


def _gone_while_written(served: Served, outcome: Outcome) -> None:
    with served.connect() as client:
        sent(client)
        served.seconds_until(1)


def _gone_from_the_queue(served: Served, outcome: Outcome) -> None:
    with served.connect() as first, served.connect() as second:
        sent(first)
        served.seconds_until(1)
        sent(second, stream=True)
        served.seconds_until(2)


def _gone_in_the_body(served: Served, outcome: Outcome) -> None:
    with served.connect() as client:
        client.sendall(head(1000) + b'{"model": ')


def _reset(served: Served, outcome: Outcome) -> None:
    """The connection is reset instead of closed, as when a machine crashes."""
    with served.connect() as client:
        sent(client, stream=True)
        client.recv(1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _body_without_end(served: Served, outcome: Outcome) -> None:
    """In chunks that say no length: refused as soon as it is too large, and no more of it is read."""
    with served.connect() as client:
        client.sendall(head(None))
        part, answer = b"%x\r\n%b\r\n" % (2**16, b" " * 2**16), b""
        with contextlib.suppress(OSError):  # it closed the connection while we were writing
            for _ in range(MORE_THAN_BUFFERS // 2**16):
                client.sendall(part)
            outcome.check(False, "a body without end was taken")
        with contextlib.suppress(OSError):
            answer = b"".join(iter(lambda: client.recv(2**16), b""))
        refused = not answer or (answer.startswith(b"HTTP/1.1 413") and is_shaped(answer.partition(b"\r\n\r\n")[2]))
        outcome.check(refused, f"a body without end was answered {answer[:80]!r}")


def _out_of_time(served: Served, outcome: Outcome) -> None:
    """The server is started with `--seconds 1`."""
    answer = served.complete()
    outcome.check(answer.status == 200 and b'"finish_reason":"length"' in answer.content, "time did not end a text")
    outcome.check(answer.seconds <= 1 + AT_ONCE_S, f"a text took {answer.seconds:.1f} s; it had 1")


QUICK: dict[str, Rudeness] = {
    "gone in a stream": _gone_in_a_stream,
    "gone while it is written": _gone_while_written,
    "gone from the queue": _gone_from_the_queue,
    "gone in the body": _gone_in_the_body,
    "reset": _reset,
    "a body without end": _body_without_end,
    "out of time": _out_of_time,
}


def rude_clients(folder: Path, count: int, tell: Tell) -> Outcome:
    """Each kind in turn on one slot, which has to be free again at once; then all the slow ones at the same time."""
    outcome, run = Outcome(), servers.run_to_serve(folder)
    slowest, slow = 0.0, max(SLOW_READERS + 2, count // 5)
    with servers.serving(run, "--slots", "1", "--queue", "4", "--seconds", "1") as served:
        text = served.complete(max_tokens=1).text
        for number in range(count - slow):
            name, rude = list(QUICK.items())[number % len(QUICK)]
            with outcome.attempt(name):
                rude(served, outcome)
                free = served.seconds_until(0)
                outcome.check(free <= AT_ONCE_S, f"{name}: its slot was taken for {free:.2f} s")
                slowest = max(slowest, free)
                outcome.check(served.complete(max_tokens=1).text == text, f"{name}: the next one got another text")
            tell(outcome.attempts, count)
    with servers.serving(run, "--slots", "8", "--queue", "1000") as served, outcome.guard("slow ones"):
        _slow_ones(served, slow, outcome)
        outcome.attempts += slow
    tell(outcome.attempts, count)
    outcome.figures = {"slowest free slot, s": slowest}
    return outcome


def _slow_ones(served: Served, count: int, outcome: Outcome) -> None:
    """Heads and bodies sent a byte at a time, and answers that are not read: closed at the time limit."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.connect(buffer=4096)) for _ in range(count)]
        readers, dawdling = clients[:SLOW_READERS], clients[SLOW_READERS:]
        for client in readers:
            _ask_for_much(client)
            outcome.check(client.recv(12) == b"HTTP/1.1 200", "a long stream did not begin")
        for number, client in enumerate(dawdling):
            client.sendall(head(10)[:30] if number % 2 else head(10_000) + b"{")
        served.seconds_until(0)  # those that do not read hold no slot
        outcome.check(served.complete(max_tokens=1).status == 200, "nobody else is served")
        limit = max(guard.BODY_SECONDS, server.IDLE_SECONDS, connections.READ_SECONDS + server.IDLE_SECONDS) + SLACK_S
        last = time.monotonic() + limit
        while time.monotonic() < last:
            time.sleep(min(1.0, limit / 20))
            outcome.check(served.healthy(), "the health is not 200 among slow clients")
            dawdling = [client for client in dawdling if not _refuses(client)]
        left = [*dawdling, *(client for client in readers if not _was_cut_off(client))]
        outcome.check(not left, f"{len(left)} of {count} slow clients are still connected after {limit:g} s")


def _refuses(client: socket.socket) -> bool:
    """Whether it is closed; else one byte more is sent."""
    if is_closed(client):
        return True
    with contextlib.suppress(OSError):
        client.send(b"X")
    return False


def _was_cut_off(client: socket.socket) -> bool:
    """An answer that was not read in time is incomplete."""
    answer = b""
    client.settimeout(SLACK_S)
    try:
        while part := client.recv(2**20):
            answer = answer[-100:] + part
    except TimeoutError:  # it would go on
        return False
    except ConnectionError:
        return True
    return b"[DONE]" not in answer


def _ask_for_much(client: socket.socket) -> None:
    """More than the buffers of both sides hold."""
    much = {"stream": True, "depth": True, "logprobs": 5, "prompt": [servers.PROMPT] * 4, "max_tokens": servers.TOKENS}
    sent(client, **much)


# --- killed, told to stop, started again ------------------------------------------------------------------------------

CLIENTS = 6
LOAD_TOKENS = 80
"""Few enough to be written within the time that a server which stops gives them, on a busy machine as well."""
STOPS = (signal.SIGKILL, signal.SIGTERM)


def restart(folder: Path, count: int, tell: Tell) -> Outcome:
    """`kill -9` and SIGTERM in turn, under load, at a random moment; then it is started again on the same port."""
    outcome, run, dice = Outcome(), servers.run_to_serve(folder), random.Random(0)
    text, ends = expected(run.path, LOAD_TOKENS), Counter()
    port = "0"
    for number in range(count):
        stop = STOPS[number % len(STOPS)]
        with outcome.attempt(stop.name):
            process = servers.start(run, "--port", port, "--slots", "2", "--queue", "2")
            try:
                served = Served(servers.port_of(process), process.pid)
                port = str(served.port)
                first = served.complete(max_tokens=5)
                outcome.check(first.status == 200 and text.startswith(first.text), "it does not serve again")
                outcome.check(served.seconds_until(0) <= AT_ONCE_S, "a slot is taken from the beginning")
                found = _under_load(served, run, partial(process.send_signal, stop), dice.uniform(0.1, 1.5))
                code = process.wait(timeout=servers.START_S)
            finally:
                process.kill()
                process.communicate()
            outcome.check(code == -stop, f"{stop.name}: exit code {code}")
            wrong = {end: n for end, n in found.items() if end in WRONG or (stop == signal.SIGTERM and end == "cut")}
            outcome.check(not wrong, f"{stop.name}: {wrong}")
            ends += Counter({f"{stop.name}, {end}": n for end, n in found.items()})
        tell(outcome.attempts, count)
    outcome.figures = dict(sorted(ends.items()))
    return outcome


WRONG = ("another text", "unclear")


def _under_load(served: Served, run: Run, stop: Callable[[], Any], after: float) -> Counter[str]:
    """What became of the requests of all clients, which ask until nothing answers."""
    text, found = expected(run.path, LOAD_TOKENS), Counter()
    adding, told = threading.Lock(), threading.Event()

    def ask(number: int) -> None:
        end = ""
        while end not in ("cut", "no connection") and not (told.is_set() and end == "refused"):
            end = _end(served, text, stream=number % 2 == 1)
            with adding:
                found[end] += 1
            time.sleep(0.05 if end == "refused" else 0.0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(after)
    stop()
    told.set()
    for thread in threads:
        thread.join()
    return found


def _end(served: Served, text: str, *, stream: bool) -> str:
    """How a request ended, as its client can tell. `cut`: the server was lost after it had begun to answer."""
    try:
        answer = served.complete(stream=stream, max_tokens=LOAD_TOKENS)
    except http.client.RemoteDisconnected:
        return "no connection"
    except (http.client.IncompleteRead, http.client.BadStatusLine):
        return "cut"
    except OSError:
        return "no connection"
    if answer.status != 200:
        return "refused" if answer.status in (429, 503) and is_shaped(answer.content) else "unclear"
    try:
        return "whole" if answer.text == text else "another text"
    except ValueError:
        return "cut"
