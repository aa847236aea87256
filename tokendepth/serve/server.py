"""Start the server for a run and stop it on a signal."""

import gc
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from tokendepth.errors import UserError
from tokendepth.progress import Progress
from tokendepth.runs.run import Run
from tokendepth.serve.app import create_app
from tokendepth.serve.connections import Connection, allow_many_files
from tokendepth.serve.service import Limits, Service
from tokendepth.trace import Execution

IDLE_SECONDS = 30
"""A connection is closed if the whole head of its next request has not arrived by then."""
SEND_BUFFER = 2**16
"""Kernel send buffer per client, in bytes; by default, one that does not read could hold megabytes."""
SWITCH_SECONDS = 0.001
"""How soon the engine's thread yields the GIL to the event loop; Python's 5 ms add up over many clients."""
GRACE_SECONDS = 30
"""After SIGTERM or Ctrl-C, requests in flight may continue for this long; new ones are not accepted."""


def serve(
    run: Path,
    *,
    host: str,
    port: int,
    limits: Limits,
    device: str,
    name: str | None,
    execution: Execution,
    api_key: str | None,
    speculate: bool | float = False,
) -> None:
    allow_many_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    with listening(host, port) as listener:  # fails before the model is loaded, which takes longer
        with Progress(f"loading {run}"):
            service = Service.of(Run.open(run), device, limits, name, speculate, execution)
        gc.collect()
        gc.freeze()  # the model stays until the end; collections that scan it would stall all clients
        address, port = listener.getsockname()[:2]
        if not address.startswith("127.") and address != "::1" and api_key is None:
            print("tokendepth: others can reach this address; set TOKENDEPTH_API_KEY to require a key", file=sys.stderr)
        shown = f"[{address}]" if ":" in address else address
        print(f"serving {service.name} at http://{shown}:{port}/v1; press Ctrl-C to stop", flush=True)
        run_until_stopped(create_app(service, api_key), listener)


def run_until_stopped(app: FastAPI, listener: socket.socket) -> None:
    """Serve until a signal arrives; requests in flight get `GRACE_SECONDS` to finish."""
    try:
        server(app).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises it again after shutting down
        sys.exit(128 + signal.SIGINT)


def server(app: FastAPI) -> uvicorn.Server:
    """A server that logs nothing about requests and closes idle connections."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        headers=[("X-Content-Type-Options", "nosniff")],
        log_level="critical",  # uvicorn's messages quote requests; the application logs errors itself
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)


def listening(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise UserError(f"--port is {port}; expected a number from 0 to 65535; 0 picks a free port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UserError(f"--host is {host!r}; expected a host name or address of this machine") from None
    # Naming the protocol makes asyncio before Python 3.12 disable Nagle's algorithm, which delays responses by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)  # also fails if another process listens here
    except OSError as error:
        listener.close()
        cause = (error.strerror or "").lower()
        raise UserError(f"cannot listen on port {port} of {host} ({cause}); choose another with --port") from None
    return listener
