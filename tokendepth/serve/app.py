"""The HTTP side: routes, the key, limits on bodies and time, streams, and every error in the API's shape."""

import asyncio
import contextlib
import hmac
import ipaddress
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tokendepth.errors import one_line
from tokendepth.infer.engine import Request as EngineRequest
from tokendepth.infer.engine import Token
from tokendepth.serve.asked import Asked, read
from tokendepth.serve.errors import Refusal, encoded
from tokendepth.serve.replies import Chat, Completion, Reply
from tokendepth.serve.service import Service
from tokendepth.serve.worker import Busy, End, Job, log_fault

BODY_SECONDS = 30.0
"""In which a client has to send the body of its request."""
BODIES_AT_ONCE = 64
"""So many bodies of the largest size may be on their way at the same time, or more that are smaller."""
CLOSING = {"Connection": "close"}
NOBODY = 499
"""The status of an answer that nobody waits for any more; it is only counted."""
STOPPING = Refusal(503, "the server was stopped before the text was complete; try again when it is back")
FAULT = Refusal(500, "a fault of the server; its log says where")

Event = tuple[int, Token | None, End | None]
Handler = Callable[[Request], Awaitable[Response]]


def create_app(service: Service, api_key: str | None = None) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.worker.stop)

    # No page of documentation, which would load scripts from elsewhere, and no CORS.
    app = FastAPI(title="tokendepth", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def guarded(handler: Handler, *, public: bool = False) -> Handler:
        """Every answer is counted, every refusal has its shape, and no fault of ours quotes a prompt."""

        async def answer(request: Request) -> Response:
            try:
                if not public:
                    _check_host(request) if api_key is None else _check_key(request, api_key)
                response = await handler(request)
            except Refusal as refusal:
                response = _refused(refusal)
            except ClientDisconnect:
                response = Response(status_code=NOBODY)
            except asyncio.CancelledError:  # by a server that stops and has waited long enough
                response = _refused(STOPPING)
            except Exception as error:
                log_fault(error)
                response = _refused(FAULT)
            service.metrics.count_answer(request.scope["route"].path, response.status_code)
            return response

        return answer

    async def completions(request: Request) -> Response:
        return await _written(service, request, "completions", Completion)

    async def chat(request: Request) -> Response:
        return await _written(service, request, "chat/completions", Chat)

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.name:
            message = f"this server has one model: {service.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return _json(_model(service))

    async def health(request: Request) -> Response:
        if not service.worker.alive:
            raise Refusal(503, "the engine has stopped; start the server again")
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_api_route("/v1/completions", guarded(completions), methods=["POST"])
    app.add_api_route("/v1/chat/completions", guarded(chat), methods=["POST"])
    app.add_api_route("/v1/models", guarded(models), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", guarded(model), methods=["GET"])
    app.add_api_route("/health", guarded(health, public=True), methods=["GET"])
    app.add_api_route("/metrics", guarded(metrics), methods=["GET"])

    @app.exception_handler(RoutingError)
    async def no_route(request: Request, error: RoutingError) -> Response:
        words = "expected another method" if error.status_code == 405 else "no such address"
        message = (
            f"{words}: this server has POST /v1/completions and /v1/chat/completions, GET /v1/models, /health, /metrics"
        )
        return _refused(Refusal(error.status_code, message, headers=dict(error.headers or {})))

    return app


# --- a request --------------------------------------------------------------------------------------------------------


async def _written(service: Service, request: Request, endpoint: str, shape: type[Reply]) -> Response:
    body = await _body(request, service)
    if service.worker.full:  # before anybody tokenises it
        raise _busy("the queue is full")
    asked, prepared = await asyncio.to_thread(_prepared, service, body, endpoint)  # tokenising may take its time
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop, indices = asyncio.get_running_loop(), {each: index for index, each in enumerate(prepared)}

    def tell(job: Job, token: Token | None, end: End | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(events.put_nowait, (indices[job.request], token, end))

    try:
        jobs = service.worker.submit(prepared, tell)
    except Busy:
        raise _busy("the queue is full") from None
    reply = shape(service.name, asked, service.engine.tokenizer, service.sites)
    if asked.stream:
        # The first event decides between an error and a stream.
        first = await _until_gone(request, events.get(), service, jobs)
        _check_end(first[2])
        return _Stream(service, jobs, _streamed(reply, prepared, first, events))
    return _json(await _until_gone(request, _collected(reply, prepared, events), service, jobs))


def _prepared(service: Service, body: bytes, endpoint: str) -> tuple[Asked, list[EngineRequest]]:
    asked = read(body, endpoint, service.name)
    return asked, service.prepared(asked)


async def _collected(reply: Reply, prepared: list[EngineRequest], events: asyncio.Queue[Event]) -> dict[str, Any]:
    ends: list[str | None] = [None] * len(prepared)
    while None in ends:
        index, _, end = await events.get()
        _check_end(end)
        ends[index] = end
    written = [request.tokens for request in prepared]
    return reply.whole(written, [str(end) for end in ends], _prompt_tokens(reply.asked, prepared))


class _Stream(StreamingResponse):
    """Server-sent events. However it ends, whether the client went away or not, the slots are free afterwards."""

    def __init__(self, service: Service, jobs: list[Job], chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._service, self._jobs = service, jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.worker.cancel(self._jobs)


async def _streamed(
    reply: Reply, prepared: list[EngineRequest], event: Event, events: asyncio.Queue[Event]
) -> AsyncIterator[bytes]:
    """The chunks of `event` and of those that follow."""
    given: list[list[Token]] = [[] for _ in prepared]
    unfinished = set(range(len(prepared)))
    try:
        for chunk in reply.first_chunks(len(prepared)):
            yield _sent(chunk)
        while True:
            index, token, end = event
            _check_end(end)
            if (chunk := reply.chunk(index, given[index], token, end)) is not None:
                yield _sent(chunk)
            given[index] += [] if token is None else [token]
            unfinished -= set() if end is None else {index}
            if not unfinished:
                break
            event = await events.get()
        if reply.asked.usage:
            yield _sent(reply.last_chunk(_prompt_tokens(reply.asked, prepared), sum(map(len, given))))
        yield b"data: [DONE]\n\n"
    except Refusal as refusal:  # too late for a status: the API tells it in the stream
        yield _sent(refusal.body)
    except Exception as error:
        log_fault(error)
        yield _sent(FAULT.body)


async def _until_gone(request: Request, work: Awaitable[Any], service: Service, jobs: list[Job]) -> Any:
    """What `work` comes to; where the client goes away first, or anything fails, the slots are free again."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except BaseException:
        service.worker.cancel(jobs)
        raise
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _prompt_tokens(asked: Asked, prepared: list[EngineRequest]) -> int:
    """Each prompt once, however many choices it has."""
    return sum(len(request.prompt) for request in prepared[:: asked.choices])


# --- limits -----------------------------------------------------------------------------------------------------------


async def _body(request: Request, service: Service) -> bytes:
    """Counted as it comes, since a chunked body says no length; and with those that come at the same time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"the content type is {kind[:80]!r}; expected application/json")
    most = service.limits.body
    too_large = Refusal(413, f"the body is larger than {most} bytes; send less", headers=CLOSING)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                service.arriving += len(part)
                if len(body) > most:
                    raise too_large
                if service.arriving > BODIES_AT_ONCE * most:
                    raise _busy("too many bodies arrive at once", CLOSING)
    except TimeoutError:
        message = f"the body did not come within {BODY_SECONDS:g} seconds; send it again"
        raise Refusal(408, message, headers=CLOSING) from None
    finally:
        service.arriving -= len(body)
    return bytes(body)


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


def _busy(cause: str, headers: dict[str, str] | None = None) -> Refusal:
    headers = {"Retry-After": "1", **(headers or {})}
    return Refusal(429, f"{cause}; try again in a second", code="queue_full", headers=headers)


def _check_end(end: End | None) -> None:
    if end == "late":
        raise _busy("no slot became free in time")
    if end == "failed":
        raise FAULT


# --- answers ----------------------------------------------------------------------------------------------------------


def _model(service: Service) -> dict[str, Any]:
    started = math.floor(service.metrics.started)
    return {"id": service.name, "object": "model", "created": started, "owned_by": "tokendepth"}


def _sent(tree: dict[str, Any]) -> bytes:
    return b"data: " + encoded(tree) + b"\n\n"


def _json(tree: dict[str, Any]) -> Response:
    return Response(encoded(tree), media_type="application/json")


def _refused(refusal: Refusal) -> Response:
    content = encoded(refusal.body)
    return Response(content, refusal.status, headers=refusal.headers, media_type="application/json")
