"""Bounded load for an OpenAI-compatible server: each client sends a request, reads its stream, and sends the next one.

Clients use plain HTTP, so that any such server on this machine can be measured.
"""

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from tokendepth.errors import UserError

PATIENCE_S = 600.0
"""A server that is silent for this long hangs."""
WORDS = (
    "the", "and", "of", "to", "in", "that", "he", "was", "it", "his", "is", "with", "as", "for", "had", "you", "not",
    "be", "her", "on", "at", "by", "which", "have", "or", "from", "this", "him", "but", "all", "she", "they", "were",
    "my", "are", "me", "one", "their", "so", "an", "said", "them", "we", "who", "would", "been", "will", "no", "when",
)  # fmt: skip
"""Letters only, so that every tokenizer has tokens for them."""


@dataclass(frozen=True)
class Load:
    clients: int
    requests: int
    """Total number; none is sent after `seconds`."""
    seconds: float
    tokens: int = 32
    """Tokens that each request asks for."""
    words: int = 12
    """Words in each prompt."""
    seed: int = 0

    def prompts(self) -> list[str]:
        """All different, so that no server has a prompt in its cache."""
        dice = random.Random(f"{self.seed} {self.clients}")
        return [" ".join(dice.choices(WORDS, k=self.words)) for _ in range(self.requests)]


@dataclass(frozen=True)
class Answer:
    """One stream as seen by the client; times in seconds since the request was sent."""

    prompt: str
    text: str
    tokens: int
    first: float
    last: float
    """When the last token arrived."""

    @property
    def a_token(self) -> float | None:
        """Mean seconds between tokens; None if there was only one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class Client:
    """A client of the server at `url`, such as http://127.0.0.1:8000."""

    def __init__(self, url: str, model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"the server is {url!r}; expected an address such as http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or 80
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        status, body = self.get("/v1/models")
        try:
            return json.loads(body)["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"{self.host}:{self.port} answers {status} to /v1/models; name its --model") from None

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise UserError(f"nothing answers at {self.host}:{self.port} ({cause}); start the server first") from None
        finally:
            connection.close()

    def complete(self, connection: http.client.HTTPConnection, prompt: str, tokens: int) -> Answer:
        """One request, streamed. Raises UserError if the server rejects it or does not finish the stream."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body = json.dumps({**asked, "stream_options": {"include_usage": True}})
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise UserError(f"the server answers {answer.status}: {answer.read()[:300].decode(errors='replace')}")
        pieces: list[str] = []
        moments: list[float] = []
        counted, done = None, False
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter() - start
            if line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
            if chunk.get("choices"):
                choice = chunk["choices"][0]
                done = done or choice.get("finish_reason") is not None
                if choice.get("text") or not pieces:
                    pieces.append(choice.get("text") or "")
                    moments.append(now)
        if not done or not moments:
            raise UserError(f"a stream of the server has no end: {''.join(pieces)[-80:]!r}")
        return Answer(prompt, "".join(pieces), counted or len(moments), moments[0], moments[-1])


def put(load: Load, client: Client, tell: Callable[[int], None] = lambda done: None) -> tuple[list[Answer], float]:
    """All answers in the order of their prompts, and the seconds from the first request to the last answer."""
    queue = iter(enumerate(load.prompts()))
    taking, found, faults = threading.Lock(), {}, []
    counted = itertools.count(1)
    gate = threading.Barrier(load.clients + 1)

    def work() -> None:
        connection = http.client.HTTPConnection(client.host, client.port, timeout=PATIENCE_S)
        gate.wait()
        try:
            while not faults and time.perf_counter() < start + load.seconds:
                with taking:
                    number, prompt = next(queue, (None, ""))
                if number is None:
                    return
                found[number] = client.complete(connection, prompt, load.tokens)
                tell(next(counted))
        except (OSError, http.client.HTTPException, ValueError, UserError) as error:
            faults.append(error)
        finally:
            connection.close()

    with ThreadPoolExecutor(load.clients) as pool:
        for _ in range(load.clients):
            pool.submit(work)
        start = time.perf_counter()
        gate.wait()
    seconds = time.perf_counter() - start
    if faults:
        raise faults[0] if isinstance(faults[0], UserError) else UserError(f"the server was lost: {faults[0]!r}")
    return [found[number] for number in sorted(found)], seconds
