"""What a client did wrong, or what the server cannot do now, in the shape of the OpenAI API."""

import json
from typing import Any


class Refusal(Exception):
    """An answer other than 200: a status, one line, and which field of the request it is about."""

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
    """JSON in ASCII, so that half a surrogate pair in what a client sent is no error of ours."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
