"""The web app: routes, handing requests to the engine, and streaming."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tokendepth.infer.engine import Request as EngineRequest
from tokendepth.infer.engine import Token
from tokendepth.serve.asked import Asked, read
from tokendepth.serve.errors import Refusal, encoded
from tokendepth.serve.guard import FAULT, Guard, busy, json_of, refuse_other_addresses
from tokendepth.serve.replies import Chat, Completion, Reply
from tokendepth.serve.service import Service
from tokendepth.serve.worker import Busy, End, Job, log_fault

Event = tuple[int, Token | None, End | None]


def create_app(service: Service, api_key: str | None = None) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.worker.stop)

    # No documentation pages, which would load scripts from elsewhere, and no CORS.
    app = FastAPI(title="tokendepth", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    guard = app.state.guard = Guard(service.limits.body, api_key, service.metrics.count_answer)

    async def completions(request: Request) -> Response:
        return await _written(service, await guard.body(request), request, "completions", Completion)

    async def chat(request: Request) -> Response:
        return await _written(service, await guard.body(request), request, "chat/completions", Chat)

    async def models(request: Request) -> Response:
        return json_of({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.name:
            message = f"model not found; this server has only {service.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")
        return json_of(_model(service))

    async def health(request: Request) -> Response:
        if not service.worker.alive:
            raise Refusal(503, "the engine has stopped; restart the server")
        return json_of({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_api_route("/v1/completions", guard(completions), methods=["POST"])
    app.add_api_route("/v1/chat/completions", guard(chat), methods=["POST"])
    app.add_api_route("/v1/models", guard(models), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", guard(model), methods=["GET"])
    app.add_api_route("/health", guard(health, public=True), methods=["GET"])
    app.add_api_route("/metrics", guard(metrics), methods=["GET"])

    refuse_other_addresses(app, "POST /v1/completions and /v1/chat/completions, GET /v1/models, /health, /metrics")
    return app


# --- a request --------------------------------------------------------------------------------------------------------


async def _written(service: Service, body: bytes, request: Request, endpoint: str, shape: type[Reply]) -> Response:
    if service.worker.full:  # saves tokenising the prompt
        raise busy("the queue is full")
    asked, prepared = await asyncio.to_thread(_prepared, service, body, endpoint)  # tokenising may be slow
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop, indices = asyncio.get_running_loop(), {each: index for index, each in enumerate(prepared)}

    def tell(job: Job, token: Token | None, end: End | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody is waiting
            loop.call_soon_threadsafe(events.put_nowait, (indices[job.request], token, end))

    try:
        jobs = service.worker.submit(prepared, tell)
    except Busy:
        raise busy("the queue is full") from None
    reply = shape(service.name, asked, service.engine.tokenizer, service.sites)
    if asked.stream:
        # Wait for the first event: an error can still get a status code.
        first = await _until_gone(request, events.get(), service, jobs)
        _check_end(first[2])
        return _Stream(service, jobs, _streamed(reply, prepared, first, events))
    return json_of(await _until_gone(request, _collected(reply, prepared, events), service, jobs))


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
    """Server-sent events. However the stream ends, its slots are freed, also if the client disconnects."""

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
    """Yield the chunks for `event` and all later events."""
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
    except Refusal as refusal:  # too late for a status code, so the error goes into the stream, as in the OpenAI API
        yield _sent(refusal.body)
    except Exception as error:
        log_fault(error)
        yield _sent(FAULT.body)


async def _until_gone(request: Request, work: Awaitable[Any], service: Service, jobs: list[Job]) -> Any:
    """Await `work`; if the client disconnects first, or anything fails, free the slots."""
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
    """Counts each prompt once, regardless of `n`."""
    return sum(len(request.prompt) for request in prepared[:: asked.choices])


def _check_end(end: End | None) -> None:
    if end == "late":
        raise busy("no slot became free in time")
    if end == "failed":
        raise FAULT


# --- answers ----------------------------------------------------------------------------------------------------------


def _model(service: Service) -> dict[str, Any]:
    started = math.floor(service.metrics.started)
    return {"id": service.name, "object": "model", "created": started, "owned_by": "tokendepth"}


def _sent(tree: dict[str, Any]) -> bytes:
    return b"data: " + encoded(tree) + b"\n\n"
