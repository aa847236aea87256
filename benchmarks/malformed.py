"""Malformed requests for the server, as many as wanted: whatever arrives, it answers in the API's shape and goes on."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class Outcome:
    """What became of them."""

    requests: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Answers of 500 and above, errors in another shape, connections that were lost."""
    slowest: float = 0.0
    """Seconds of the slowest answer."""


def attack(url: str, model: str, count: int, seed: int = 0) -> Outcome:
    """Send `count` requests, most of them malformed, to the server at `url`, and look at each answer."""
    import httpx2

    dice, found = random.Random(seed), Outcome()
    with httpx2.Client(base_url=url, timeout=30) as client:
        for method, path, headers, content in _requests(dice, model, count):
            start = time.monotonic()
            try:
                answer = client.request(method, path, headers=headers, content=content)
            except httpx2.TransportError as error:
                found.faults.append(f"{method} {path}: {type(error).__name__}")
                continue
            seconds, status = time.monotonic() - start, answer.status_code
            found.requests += 1
            found.statuses[status] = found.statuses.get(status, 0) + 1
            found.slowest = max(found.slowest, seconds)
            if status >= 500 or (status >= 400 and not is_shaped(answer.content)):
                said = bytes(content[:200]) if isinstance(content, bytes) else content
                found.faults.append(f"{method} {path}: {status} to {said!r}")
    return found


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
            path = dice.choice(
                (*PATHS, "/", "/v1", "/v1/models", "/v1/models/x%2Fy", "/docs", "/openapi.json", "/../health")
            )
        elif kind == "type":
            headers = {
                "Content-Type": dice.choice(("text/plain", "", "application/x-www-form-urlencoded", "a/" + "b" * 900))
            }
        yield method, path, headers, iter([content[:7], content[7:]]) if kind == "chunks" else content
