"""Errors in the format of the OpenAI API."""

import json
from typing import Any


class Refusal(Exception):
    """An error response: a status, a one-line message, and the field of the request it concerns."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def encoded(tree: Any) -> bytes:
    """JSON in ASCII, so that an unpaired surrogate from a client can be encoded."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
