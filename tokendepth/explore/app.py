"""The page and its endpoints. Under /runs/N is the API of `tokendepth serve`, with which the page generates text."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException as RoutingError

from tokendepth.errors import UserError, one_line
from tokendepth.explore.about import about
from tokendepth.explore.explored import Explored
from tokendepth.serve import app as serving
from tokendepth.serve.errors import Refusal
from tokendepth.serve.guard import Guard, Handler, busy, json_of, refuse_other_addresses

PAGE = Path(__file__).parent / "page"
SCRIPT, STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
FILES = {
    "index.html": "text/html; charset=utf-8",
    "explore.js": SCRIPT,
    "parts.js": SCRIPT,
    "reading.js": SCRIPT,
    "saving.js": SCRIPT,
    "preact.js": SCRIPT,
    "uplot.js": SCRIPT,
    "explore.css": STYLE,
    "uplot.css": STYLE,
}
"""Files that the browser may load, with their content types."""
HEADERS = {
    # With this policy the browser itself prevents loading anything from elsewhere and sending text there.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LONGEST_BODY = 2**18
WAITING = 8
"""Texts that may wait to be processed; the page sends a new one after every edit."""


def create_app(explored: Sequence[Explored]) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for each in explored:
            each.start()
        yield
        for each in explored:
            await asyncio.to_thread(each.stop)

    app = FastAPI(title="tokendepth", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    guard, places = Guard(LONGEST_BODY), asyncio.Semaphore(WAITING)

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in FILES:
            raise RoutingError(404)
        return Response((PAGE / name).read_bytes(), media_type=FILES[name], headers=HEADERS)

    async def runs(request: Request) -> Response:
        return json_of([each.facts for each in explored])

    def looks_of(run: Explored) -> Handler:
        async def look(request: Request) -> Response:
            body = await guard.body(request)
            if places.locked():
                raise busy("too many texts are waiting")
            async with places:
                return json_of(await asyncio.to_thread(_looked, run, body))

        return look

    def facts_of(run: Explored) -> Handler:
        async def facts(request: Request) -> Response:
            try:
                return json_of(await asyncio.to_thread(about, run.run))
            except UserError as error:
                raise Refusal(404, one_line(str(error))) from None

        return facts

    app.add_api_route("/", guard(file), methods=["GET"])
    app.add_api_route("/runs", guard(runs), methods=["GET"])
    app.add_api_route("/{name}", guard(file), methods=["GET"])
    for number, each in enumerate(explored):
        app.add_api_route(f"/runs/{number}/look", guard(looks_of(each)), methods=["POST"])
        app.add_api_route(f"/runs/{number}/about", guard(facts_of(each)), methods=["GET"])
        app.mount(f"/runs/{number}", serving.create_app(each.service))
    refuse_other_addresses(app, "its page at /")
    return app


def _looked(run: Explored, body: bytes) -> dict[str, Any]:
    """Parse the page's request {"text", "execution", "point"} strictly, and answer it."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or set(fields) != {"text", "execution", "point"}:
        raise Refusal(400, "the body is invalid; expected a JSON object with text, execution and point")
    text, execution, point = fields["text"], fields["execution"], fields["point"]
    if not isinstance(text, str):
        raise Refusal(400, "text is invalid; expected a string", param="text")
    if execution not in run.executions:
        raise Refusal(400, f"execution is unknown; expected one of {', '.join(run.executions)}", param="execution")
    if point is not None and point not in run.points:
        there = ", ".join(f"{each:g}" for each in run.points) or "none: this run has no budget or threshold"
        raise Refusal(400, f"point is unknown; expected null or one of {there}", param="point")
    try:
        return run.look(text, execution, point)
    except UserError as error:
        raise Refusal(400, one_line(str(error)), param="text") from None
