"""Any number of malformed requests for the server: it always answers in the API's format and keeps serving."""

import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import servers
from benchmarks.faults.outcome import Outcome, Tell
from benchmarks.faults.servers import AT_ONCE_S, NAME, Served

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**300, -0.5, 1e308, 1e-320, "", "x", "\0", "\ud800", "é" * 500,
    "<script>", [], [[]], [None], ["", ""], [1, "a"], [-1], [10**9], [2**70], ["x"] * 70, {}, {"a": {}}, [[1], "x"],
    {"role": "user"},
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "budget", "depth", "suffix", "best_of", "echo", "tools", "user",
    "proompt",
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions")
OTHER_PATHS = ("/", "/v1", "/v1/models", "/v1/models/x%2Fy", "/docs", "/openapi.json", "/../health")
TYPES = ("text/plain", "", "application/x-www-form-urlencoded", "a/" + "b" * 900)
NOT_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"\r\n\r\n\r\n\r\nx y", b"GET /health HTTP/1.1\r\n\r\n",
    b"GET  /health\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\x00b\r\n\r\n", b"GET /health HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
)  # fmt: skip
"""Not HTTP/1.1 requests at all."""


def malformed(folder: Path, count: int, tell: Tell) -> Outcome:
    """Requests whose JSON, fields, address or type are wrong; and a twentieth of them that are not HTTP."""
    outcome = Outcome()
    with servers.serving(servers.run_to_serve(folder)) as served:
        found = attack(served.url, NAME, count, tell=lambda done: tell(done, count))
        not_http(served, max(len(NOT_HTTP), count // 20), found)
        outcome.attempts = found.requests
        for failure in found.faults:
            outcome.check(False, failure)
        outcome.check(found.slowest <= AT_ONCE_S, f"{found.slowest_of}: {found.slowest:.2f} s")
        outcome.check(served.healthy(), "the health is not 200")
        free = served.seconds_until(0)
        outcome.check(free <= AT_ONCE_S, f"a slot was taken for {free:.1f} s")
    statuses = {str(status): number for status, number in sorted(found.statuses.items())}
    outcome.figures = {"slowest answer, s": found.slowest, "statuses": statuses}
    return outcome


@dataclass
class Found:
    """What became of them."""

    requests: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Answers of 500 and above, errors in another shape, connections that were lost."""
    slowest: float = 0.0
    """Seconds of the slowest answer."""
    slowest_of: str = ""

    def note(self, what: str, status: int, content: bytes, seconds: float) -> None:
        self.requests += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if seconds > self.slowest:
            self.slowest, self.slowest_of = seconds, what
        if status >= 500 or (status >= 400 and not is_shaped(content)):
            self.faults.append(f"{what}: {status}")


def attack(url: str, model: str, count: int, seed: int = 0, tell: Callable[[int], None] = lambda done: None) -> Found:
    """Send `count` requests, most of them malformed, to the server at `url`, and look at each answer."""
    import httpx2

    dice, found = random.Random(seed), Found()
    with httpx2.Client(base_url=url, timeout=30) as client:
        for method, path, headers, content in _requests(dice, model, count):
            start = time.monotonic()
            try:
                answer = client.request(method, path, headers=headers, content=content)
            except httpx2.TransportError as error:
                found.faults.append(f"{method} {path}: {type(error).__name__}")
                continue
            said = bytes(content[:200]) if isinstance(content, bytes) else content
            seconds = time.monotonic() - start
            found.note(f"{method} {path} of {said!r}", answer.status_code, answer.content, seconds)
            tell(found.requests)
    return found


def not_http(served: Served, count: int, found: Found, seed: int = 0) -> None:
    """Also rejected in the API's format, and the connection is closed."""
    dice = random.Random(seed)
    for number in range(count):
        content = NOT_HTTP[number] if number < len(NOT_HTTP) else dice.randbytes(dice.randint(1, 300)) + b"\r\n\r\n"
        start = time.monotonic()
        with served.connect() as client:
            try:
                client.sendall(content)
                client.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda client=client: client.recv(2**16), b""))
            except OSError:  # it was closed while we were writing
                continue
        head, _, body = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = body[: int(length[1])] if length else body  # a second answer may follow
        if not 400 <= status < 500:
            found.faults.append(f"not HTTP, {content[:60]!r}: {answer[:100]!r}")
        found.note(f"not HTTP, {content[:60]!r}", status, body, time.monotonic() - start)


def is_shaped(content: bytes) -> bool:
    """Whether an error is one of the API: a message of one line, a type, a parameter and a code."""
    try:
        error = json.loads(content)["error"]
        texts = [error["message"], error["type"]]
        named = [error["param"], error["code"]]
    except (ValueError, KeyError, TypeError):
        return False
    one_line = isinstance(texts[0], str) and texts[0].strip() and "\n" not in texts[0] and len(texts[0]) < 2500
    return bool(one_line and isinstance(texts[1], str) and all(isinstance(each, str | None) for each in named))


def _requests(dice: random.Random, model: str, count: int) -> Iterator[tuple[str, str, dict[str, str], Any]]:
    for _ in range(count):
        path = dice.choice(PATHS)
        body = {"model": model, "max_tokens": dice.randint(1, 3)}
        body |= {"prompt": "green"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "green"}]}
        method, headers = "POST", {"Content-Type": "application/json"}
        kind = dice.choice(("field", "field", "field", "fields", "bytes", "cut", "nested", "route", "type", "chunks"))
        if kind in ("field", "fields", "chunks"):
            for _ in range(1 if kind != "fields" else dice.randint(2, 5)):
                body[dice.choice(FIELDS)] = dice.choice(JUNK)
        content = json.dumps(body).encode()
        if kind == "bytes":
            content = bytes(dice.randbytes(dice.randint(0, 80)))
        elif kind == "cut":
            content = content[: dice.randrange(len(content))]
        elif kind == "nested":
            depth = dice.choice((10, 900, 100_000))
            content = content[:-1] + b', "stop": ' + b"[" * depth + b"]" * depth + b"}"
            content = dice.choice((content, content.replace(b"[", b'{"a":').replace(b"]", b"}"), b"[" * depth))
        elif kind == "route":
            method = dice.choice(("GET", "PUT", "DELETE", "POST", "OPTIONS", "PATCH"))
            path = dice.choice((*PATHS, *OTHER_PATHS))
        elif kind == "type":
            headers = {"Content-Type": dice.choice(TYPES)}
        yield method, path, headers, iter([content[:7], content[7:]]) if kind == "chunks" else content
