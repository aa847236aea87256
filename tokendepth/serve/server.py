"""Start the server of a run, on an address that is free, and stop it when a signal asks for that."""

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
"""A connection that has not sent the whole head of its next request by then is closed."""
SEND_BUFFER = 2**16
"""Bytes that the kernel keeps for a client that does not read; by itself it would take megabytes for each."""
SWITCH_SECONDS = 0.001
"""The engine's thread lets those that answer clients run after so long; Python's own 5 ms add up over many clients."""
GRACE_SECONDS = 30
"""After SIGTERM or Ctrl-C: so long what is in flight may go on; nothing new is taken."""


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
    with listening(host, port) as listener:  # before the model is loaded, which takes longer
        with Progress(f"loading {run}"):
            service = Service.of(Run.open(run), device, limits, name, speculate, execution)
        gc.collect()
        gc.freeze()  # what stays for ever: to go through it again would keep all clients waiting
        address, port = listener.getsockname()[:2]
        if not address.startswith("127.") and address != "::1" and api_key is None:
            print("tokendepth: others can reach this address; set TOKENDEPTH_API_KEY to ask for a key", file=sys.stderr)
        shown = f"[{address}]" if ":" in address else address
        print(f"serving {service.name} at http://{shown}:{port}/v1; Ctrl-C ends it", flush=True)
        run_until_stopped(create_app(service, api_key), listener)


def run_until_stopped(app: FastAPI, listener: socket.socket) -> None:
    """By a signal; what is in flight may go on for a while."""
    try:
        server(app).run(sockets=[listener])
    except KeyboardInterrupt:  # raised again when everything has ended
        sys.exit(128 + signal.SIGINT)


def server(app: FastAPI) -> uvicorn.Server:
    """Nothing of a request is logged; connections that are not used are closed."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        headers=[("X-Content-Type-Options", "nosniff")],
        log_level="critical",  # what uvicorn has to say would quote requests; faults are logged by the application
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return uvicorn.Server(config)


def listening(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise UserError(f"--port is {port}; expected a number from 0 to 65535; 0 takes a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UserError(f"--host is {host!r}; expected a name or an address of this machine") from None
    # Named, or asyncio before Python 3.12 lets answers wait for 40 ms to be sent together (Nagle's algorithm).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)  # refuses too where another one listens
    except OSError as error:
        listener.close()
        cause = (error.strerror or "").lower()
        raise UserError(f"port {port} of {host} cannot be taken ({cause}); choose another with --port") from None
    return listener
