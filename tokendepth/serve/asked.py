"""Strict parsing of request bodies: every mistake gives a one-line error that names the field."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokendepth.config import LARGEST_SEED
from tokendepth.errors import did_you_mean, one_line
from tokendepth.infer.sampling import LARGEST_BIAS, LOWEST_PENALTY, LOWEST_TEMPERATURE, Sampling
from tokendepth.serve.errors import Refusal

MOST_STOPS, MOST_CHOICES, MOST_PROMPTS = 4, 8, 64
LONGEST_STOP = 1000
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields of the OpenAI API that are accepted and have no effect."""
NOT_HERE: dict[str, dict[str, tuple]] = {
    "completions": {"suffix": ("",), "best_of": (1,), "echo": (False,)},
    "chat/completions": {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
    },
}
"""Unsupported fields of the OpenAI API, and their values besides null that are accepted because they need nothing."""
SHARED = (
    "model", "stream", "stream_options", "temperature", "top_p", "n", "stop", "seed", "presence_penalty",
    "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "top_k", "min_p", "repetition_penalty", "budget",
    "depth",
)  # fmt: skip
OWN = {"completions": ("prompt",), "chat/completions": ("messages", "max_completion_tokens", "top_logprobs")}


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Asked:
    """A well-formed request, not yet checked against the model."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or token ids to continue; empty for a chat."""
    messages: tuple[Message, ...]
    sampling: Sampling
    max_tokens: int | None
    choices: int
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """Whether a stream ends with a usage chunk."""
    budget: float | None
    depth: bool


def read(body: bytes, endpoint: str, model: str) -> Asked:
    """Parse a request to `endpoint`, `completions` or `chat/completions`, of a server for `model`."""
    fields = _fields(body, endpoint)
    _check_model(fields, model)
    number = _Numbers(fields)
    chat = endpoint == "chat/completions"
    stream = _flag(fields, "stream")
    options = _given(fields, "stream_options", dict, 'an object such as {"include_usage": true}') or {}
    if options and not stream:
        raise _wrong("stream_options", options, "it only if stream is true")
    temperature = number("temperature", 0, 2, 1.0)
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise _wrong("temperature", temperature, f"0, or a number from {LOWEST_TEMPERATURE} to 2")
    logprobs = _chat_logprobs(fields, number) if chat else number.optional("logprobs", 0, 5)
    seed = number.optional("seed", -(2**63), 2**63 - 1)
    sampling = Sampling(
        temperature=temperature,
        top_k=number.whole("top_k", 0, 10**9, 0),
        top_p=number("top_p", 0, 1, 1.0, above=True),
        min_p=number("min_p", 0, 1, 0.0),
        repetition_penalty=number("repetition_penalty", LOWEST_PENALTY, 100, 1.0),
        presence_penalty=number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_bias(fields),
        seed=secrets.randbelow(LARGEST_SEED + 1) if seed is None else seed % (LARGEST_SEED + 1),
        logprobs=logprobs,
    )
    most = number.optional("max_tokens", 1, 10**9)
    if chat:
        most = number.optional("max_completion_tokens", 1, 10**9) or most
    return Asked(
        prompts=() if chat else _prompts(fields),
        messages=_messages(fields) if chat else (),
        sampling=sampling,
        max_tokens=most,
        choices=number.whole("n", 1, MOST_CHOICES, 1),
        stop=_stop(fields),
        stream=stream,
        usage=_flag(options, "include_usage"),
        budget=number.real("budget", 0, 1, above=True),
        depth=_flag(fields, "depth"),
    )


def _fields(body: bytes, endpoint: str) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a number")

    try:
        fields = json.loads(body.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        raise Refusal(400, "the body is not JSON; send one JSON object in UTF-8") from None
    if not isinstance(fields, dict):
        raise Refusal(400, f"the body is JSON but not an object: {_short(fields)}; send one JSON object")
    known = (*SHARED, *OWN[endpoint], *IGNORED, *NOT_HERE[endpoint])
    for name in fields:
        if name not in known:
            message = f"unknown field {_short(name)}; {did_you_mean(name[:80], known)}"
            raise Refusal(400, one_line(message), param=name[:80], code="unknown_parameter")
    for name, harmless in NOT_HERE[endpoint].items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in harmless):
            message = f"{name} is {_short(value)}, which this server does not support; leave it out"
            raise Refusal(400, message, param=name, code="unsupported_parameter")
    return fields


def _check_model(fields: Mapping[str, Any], model: str) -> None:
    name = fields.get("model")
    if not isinstance(name, str):
        raise _wrong("model", name, f"the name of this server's model, {model!r}")
    if name != model:
        message = f"model {_short(name)} is not served here; this server has only {model!r}"
        raise Refusal(404, message, param="model", code="model_not_found")


class _Numbers:
    """Reads numeric fields; null means the default, as in the OpenAI API."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def __call__(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        found = self.real(name, low, high, above=above)
        return default if found is None else found

    def real(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """`above`: exclude `low` itself."""
        value = self.fields.get(name)
        if value is None:
            return None
        expected = f"a number {'above' if above else 'from'} {low} {'up ' if above else ''}to {high}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (low < value if above else low <= value) or not value <= high:
            raise _wrong(name, value, expected)
        return float(value)

    def optional(self, name: str, low: int, high: int) -> int | None:
        value = self.fields.get(name)
        if value is not None and not (type(value) is int and low <= value <= high):
            raise _wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def whole(self, name: str, low: int, high: int, default: int) -> int:
        found = self.optional(name, low, high)
        return default if found is None else found


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return bool(_given(fields, name, bool, "true or false"))


def _given(fields: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise _wrong(name, value, expected)
    return value


def _chat_logprobs(fields: Mapping[str, Any], number: _Numbers) -> int | None:
    top = number.optional("top_logprobs", 0, 20)
    if not _flag(fields, "logprobs"):
        if top:
            raise _wrong("top_logprobs", top, "it only if logprobs is true")
        return None
    return top or 0


def _bias(fields: Mapping[str, Any]) -> dict[int, float]:
    expected = f"an object of token ids, each with a number from -{LARGEST_BIAS} to {LARGEST_BIAS}"
    found = {}
    for token, bias in (_given(fields, "logit_bias", dict, expected) or {}).items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isascii() and token.isdigit() and len(token) < 10) or not number or not abs(bias) <= LARGEST_BIAS:
            raise _wrong("logit_bias", {token: bias}, expected)
        found[int(token)] = float(bias)
    return found


def _stop(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop")
    strings = [] if value is None else [value] if isinstance(value, str) else value
    right = isinstance(strings, list) and len(strings) <= MOST_STOPS
    if not right or not all(isinstance(string, str) and 0 < len(string) <= LONGEST_STOP for string in strings):
        raise _wrong("stop", value, f"up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return tuple(strings)


def _prompts(fields: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    value = fields.get("prompt")
    several = value if isinstance(value, list) and _ids(value) is None else [value]
    prompts = [each if isinstance(each, str) else _ids(each) for each in several]
    found = tuple(prompt for prompt in prompts if prompt)
    if not found or len(found) < len(prompts) or len(found) > MOST_PROMPTS:
        expected = f"a string, a list of token ids, or a list of up to {MOST_PROMPTS} of either, none of them empty"
        raise _wrong("prompt", value, expected)
    return found


def _ids(value: object) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(type(token) is int for token in value) else None


def _messages(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "a list of at least one message")
    return tuple(_message(each, f"messages[{number}]") for number, each in enumerate(value))


def _message(value: object, name: str) -> Message:
    expected = 'an object such as {"role": "user", "content": "text"}'
    if not isinstance(value, dict) or not {*value} <= {"role", "content", "name"}:
        raise _wrong(name, value, expected)
    role, content = value.get("role"), value.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise _wrong(f"{name}.role", role, "system, developer, user or assistant")
    if isinstance(content, list):  # content parts; only text parts are supported
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        strings = [part for part in parts if isinstance(part, str)]
        content = "".join(strings) if len(strings) == len(content) else None
    if not isinstance(content, str):
        raise _wrong(f"{name}.content", value.get("content"), "text")
    return Message("system" if role == "developer" else str(role), content)


def _wrong(name: str, value: object, expected: str) -> Refusal:
    return Refusal(400, f"{name} is {_short(value)}; expected {expected}", param=name)


def _short(value: object) -> str:
    """The value on one line, shortened: the beginning suffices to recognise it."""
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = "too deeply nested"
    return one_line(text if len(text) <= 80 else f"{text[:60]}[...]")
