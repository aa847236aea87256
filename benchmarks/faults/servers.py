"""A server of a small run in its own process, as a user starts it, and tools for rude clients."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tokendepth as td
from benchmarks.faults.outcome import Hang, package_environment, subject
from tokendepth.config import BudgetConfig
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

NAME = "bottles"
PROMPT = "9 green"
AT_ONCE_S = 1.0
"""A refusal, the health and a slot that becomes free may take so long, however busy the server is."""
SLACK_S = 5.0
"""After a time limit of the server's: by then it has acted on it, however busy the machine is."""
CONTEXT = 256
TOKENS = 240
"""That take a second or more: a request is still there when something happens to it."""
START_S = 60.0


def run_to_serve(folder: Path) -> Run:
    """With a dial; a token takes some milliseconds."""
    (folder / "served").mkdir(parents=True, exist_ok=True)
    text = "".join(f"{n} green bottles on the wall, {n * n} of them\n" for n in range(150, 0, -1))
    (folder / "served" / "corpus.txt").write_text(text, encoding="utf-8")
    config = subject(folder / "served", BudgetConfig(), recipe="demo.budget", layers=6, steps=2, batch_size=1)
    config = replace(config, model=replace(config.model, context=CONTEXT, dropout=0.0))
    return train(config, folder / "served" / NAME, show=False)


@cache
def expected(run: Path, tokens: int) -> str:
    """What every request for so many tokens has to get."""
    return td.generate(run, PROMPT, tokens=tokens, temperature=0, device="cpu").text


def asking(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, **changes}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes
    seconds: float

    @property
    def text(self) -> str:
        """Of a whole answer or of a stream; a ValueError where it does not come to its end."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return json.loads(self.content)["choices"][0]["text"]
        *chunks, last = [line.removeprefix("data: ") for line in self.content.decode().split("\n\n") if line]
        if last != "[DONE]":
            raise ValueError(f"a stream that ends with {last[-80:]!r}")
        return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


@dataclass(frozen=True)
class Served:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, buffer: int | None = None) -> socket.socket:
        """`buffer`: bytes that the kernel keeps until the client reads them; by itself it would take megabytes."""
        client = socket.socket()
        client.settimeout(START_S)
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect(("127.0.0.1", self.port))
        return client

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """`body`: JSON to send. The connection is closed; errors of the transport are raised."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        start = time.monotonic()
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            lower = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, lower, answer.read(), time.monotonic() - start)
        finally:
            connection.close()

    def complete(self, **changes: Any) -> Answer:
        return self.ask("POST", "/v1/completions", asking(**changes))

    def healthy(self) -> bool:
        answer = self.ask("GET", "/health")
        return answer.status == 200 and answer.seconds <= AT_ONCE_S

    @property
    def open(self) -> int:
        """Requests that run or wait."""
        figures = self.ask("GET", "/metrics").content.decode()
        return sum(map(int, re.findall(r"^tokendepth_(?:running|waiting) (\d+)$", figures, re.MULTILINE)))

    def seconds_until(self, count: int) -> float:
        """Until so many requests run or wait; Hang if that takes a minute."""
        start = time.monotonic()
        while self.open != count:
            if time.monotonic() > start + START_S:
                raise Hang(f"{self.open} requests run or wait; expected {count}")
            time.sleep(0.01)
        return time.monotonic() - start

    @property
    def memory(self) -> int:
        """Resident memory in bytes."""
        (found,) = re.findall(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        return int(found) * 1024


def head(length: int | None) -> bytes:
    """Of a request; None: its body comes in chunks and says no length."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", size)
    return "\r\n".join([*lines, "", ""]).encode()


def sent(client: socket.socket, **changes: Any) -> None:
    """A whole request, whose answer is not waited for."""
    body = json.dumps(asking(**changes)).encode()
    client.sendall(head(len(body)) + body)


def is_closed(client: socket.socket) -> bool:
    """Whether the server has ended this connection; what it sent before is read and forgotten."""
    client.setblocking(False)
    try:
        while client.recv(2**16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def serving(run: Run, *words: str) -> Iterator[Served]:
    """`words`: options of the command. In the end it is killed, if it still runs."""
    process = start(run, *words)
    try:
        yield Served(port_of(process), process.pid)
    finally:
        process.kill()
        process.communicate()


def start(run: Run, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tokendepth", "serve", str(run.path), "--device", "cpu"]
    command += words if "--port" in words else ["--port", "0", *words]
    environment = {name: value for name, value in package_environment().items() if name != "TOKENDEPTH_API_KEY"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


def port_of(process: subprocess.Popen[str]) -> int:
    """Its port, as soon as it serves."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if (found := re.search(r"at http://[^/]+:(\d+)/v1", line)) is None:
        raise RuntimeError(f"the server did not start: {line}{process.stderr.read()[-300:]}")
    return int(found[1])
