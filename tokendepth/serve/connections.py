"""Limits on connections that uvicorn leaves to a reverse proxy, since there may be none.

The whole request head must arrive within the idle timeout; clients must read their responses; connections are limited
by the number of open files; and input that is not HTTP gets an error in the OpenAI format.
"""

import asyncio
import socket
import struct
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokendepth.serve.errors import Refusal, encoded

try:
    import resource
except ImportError:  # not on Windows
    resource = None

READ_SECONDS = 30.0
"""Time for a client to read what fills the send buffers: tens of kilobytes, or the end of a response."""
OTHER_FILES = 64
"""File descriptors reserved for anything but connections."""
NOT_HTTP = Refusal(400, "this is not an HTTP/1.1 request; send one as for the OpenAI API")
CROWDED = Refusal(503, "too many connections are open; try again later", headers={"Retry-After": "1"})


def allow_many_files() -> None:
    """Raise the limit on open files as far as allowed: every connection needs one."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections() -> int:
    if resource is None:
        return 2**16
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES)


class Connection(H11Protocol):
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._refuse(CROWDED)
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """uvicorn stops the idle timeout at the first byte; here it runs until the whole head has arrived."""
        self.conn.receive_data(data)
        self.handle_events()

    def send_400_response(self, msg: str) -> None:
        self._refuse(NOT_HTTP)

    def _refuse(self, refusal: Refusal) -> None:
        """Write the response without h11, which may be in any state."""
        self._unset_keepalive_if_required()
        body = encoded(refusal.body)
        lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in refusal.headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for a client that does not read
            self._cut_off()
        elif self.conn.our_state is h11.IDLE:
            super().timeout_keep_alive_handler()
        else:
            self.transport.close()

    def _cut_off(self) -> None:
        """Close with a reset, so that the kernel drops unsent data at once instead of waiting for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(READ_SECONDS, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_reading_clock()

    def _stop_reading_clock(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
