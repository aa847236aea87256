"""What stands before every address: the key or the host, limits on bodies and their time, errors in one shape."""

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
"""In which a client has to send the body of its request."""
BODIES_AT_ONCE = 64
"""So many bodies of the largest size may be on their way at the same time, or more that are smaller."""
CLOSING = {"Connection": "close"}
NOBODY = 499
"""The status of an answer that nobody waits for any more; it is only counted."""
STOPPING = Refusal(503, "the server was stopped before the text was complete; try again when it is back")
FAULT = Refusal(500, "a fault of the server; its log says where")

Handler = Callable[[Request], Awaitable[Response]]


class Guard:
    def __init__(self, largest_body: int, api_key: str | None = None, count: Callable[[str, int], None] | None = None):
        """largest_body: in bytes. count: told the address and the status of every answer."""
        self.largest_body, self.api_key, self.count = largest_body, api_key, count
        self.arriving = 0
        """Bytes of bodies that are not whole yet; counted by the event loop alone."""

    def __call__(self, handler: Handler, *, public: bool = False) -> Handler:
        """Every answer is counted, every refusal has its shape, and no fault of ours quotes a prompt."""

        async def answer(request: Request) -> Response:
            try:
                if not public:
                    _check_host(request) if self.api_key is None else _check_key(request, self.api_key)
                response = await handler(request)
            except Refusal as refusal:
                response = refused(refusal)
            except ClientDisconnect:
                response = Response(status_code=NOBODY)
            except asyncio.CancelledError:  # by a server that stops and has waited long enough
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
        """Counted as it comes, since a chunked body says no length; and with those that come at the same time."""
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
                        raise busy("too many bodies arrive at once", CLOSING)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:g} seconds; send it again"
            raise Refusal(408, message, headers=CLOSING) from None
        finally:
            self.arriving -= len(body)
        return bytes(body)


def refuse_other_addresses(app: FastAPI, addresses: str) -> None:
    """addresses: those that there are, in words."""

    @app.exception_handler(RoutingError)
    async def no_route(request: Request, error: RoutingError) -> Response:
        words = "expected another method" if error.status_code == 405 else "no such address"
        message = f"{words}: this server has {addresses}"
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
    # In constant time, and byte for byte: headers come as Latin-1, whatever they were.
    right = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        message = "the API key is missing or wrong; send it as: Authorization: Bearer KEY"
        raise Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _check_host(request: Request) -> None:
    """A page of the web may give its own name this machine's address, and would then be answered as its owner is."""
    address, _ = request.scope["server"]
    host = request.headers.get("host", "")
    if host and _is_loopback(address) and not _is_loopback(_name_of(host)):
        message = f"the Host is {host[:80]!r}; without a key this server answers to localhost and its address alone"
        raise Refusal(403, one_line(f"{message}; set TOKENDEPTH_API_KEY to use other names"), param="Host")


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
