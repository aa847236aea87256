"""Checks in front of every endpoint: API key or host, size and time limits for bodies, uniform errors."""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect

from tokendepth.errors import one_line
from tokendepth.serve.errors import Refusal, encoded
from tokendepth.serve.worker import log_fault

BODY_SECONDS = 30.0
"""Time for a client to send the body of its request."""
BODIES_AT_ONCE = 64
"""Bodies of the largest size that may arrive at the same time; more if they are smaller."""
CLOSING = {"Connection": "close"}
NOBODY = 499
"""Status if the client has disconnected; only metrics see it."""
STOPPING = Refusal(503, "the server was stopped before the response was complete; try again later")
FAULT = Refusal(500, "internal server error; the server's log shows where")

Handler = Callable[[Request], Awaitable[Response]]


class Guard:
    def __init__(self, largest_body: int, api_key: str | None = None, count: Callable[[str, int], None] | None = None):
        """largest_body: in bytes. count: called with the endpoint and the status of every response."""
        self.largest_body, self.api_key, self.count = largest_body, api_key, count
        self.arriving = 0
        """Bytes of bodies that are still arriving; only the event loop changes this."""

    def __call__(self, handler: Handler, *, public: bool = False) -> Handler:
        """Wrap a handler: count every response, format every error, and never log or return a prompt."""

        async def answer(request: Request) -> Response:
            try:
                if not public:
                    _check_host(request) if self.api_key is None else _check_key(request, self.api_key)
                response = await handler(request)
            except Refusal as refusal:
                response = refused(refusal)
            except ClientDisconnect:
                response = Response(status_code=NOBODY)
            except asyncio.CancelledError:  # the server is stopping and the grace period is over
                response = refused(STOPPING)
            except RoutingError:
                raise
            except Exception as error:
                log_fault(error)
                response = refused(FAULT)
            if self.count is not None:
                self.count(request.scope["route"].path, response.status_code)
            return response

        return answer

    async def body(self, request: Request) -> bytes:
        """Count bytes as they arrive, since chunked bodies have no length, alone and together with other bodies."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, f"the content type is {kind[:80]!r}; expected application/json")
        most = self.largest_body
        too_large = Refusal(413, f"the body is larger than {most} bytes; send less", headers=CLOSING)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    self.arriving += len(part)
                    if len(body) > most:
                        raise too_large
                    if self.arriving > BODIES_AT_ONCE * most:
                        raise busy("too many request bodies are arriving at once", CLOSING)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:g} seconds; send it again"
            raise Refusal(408, message, headers=CLOSING) from None
        finally:
            self.arriving -= len(body)
        return bytes(body)


def refuse_other_addresses(app: FastAPI, addresses: str) -> None:
    """addresses: the existing ones, in words."""

    @app.exception_handler(RoutingError)
    async def no_route(request: Request, error: RoutingError) -> Response:
        words = "wrong method" if error.status_code == 405 else "no such address"
        message = f"{words}; this server has {addresses}"
        return refused(Refusal(error.status_code, message, headers=dict(error.headers or {})))


def busy(cause: str, headers: dict[str, str] | None = None) -> Refusal:
    headers = {"Retry-After": "1", **(headers or {})}
    return Refusal(429, f"{cause}; try again in a second", code="queue_full", headers=headers)


def json_of(tree: Any) -> Response:
    return Response(encoded(tree), media_type="application/json")


def refused(refusal: Refusal) -> Response:
    content = encoded(refusal.body)
    return Response(content, refusal.status, headers=refusal.headers, media_type="application/json")


def _check_key(request: Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Constant time, on bytes: headers are decoded as Latin-1 whatever their encoding.
    right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
        raise Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _check_host(request: Request) -> None:
    """Reject DNS rebinding, with which a web page could use this server through its visitor's browser."""
    address, _ = request.scope["server"]
    host = request.headers.get("host", "")
    if host and _is_loopback(address) and not _is_loopback(_name_of(host)):
        message = f"the Host header is {host[:80]!r}; without an API key only localhost and loopback addresses work"
        raise Refusal(403, one_line(f"{message}; set TOKENDEPTH_API_KEY to allow others"), param="Host")


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
