"""Without a reverse proxy, connections and bodies are limited in number, time and size."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from benchmarks.faults.malformed import is_shaped
from tests.serve.conftest import Served, serving
from tests.serve.test_faults import GOOD, head, post
from tokendepth.serve import connections, guard, server
from tokendepth.serve.service import Limits, Service

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.slow]


def heard(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of everything received until the connection is closed."""
    client.settimeout(10)
    answer, _, body = b"".join(iter(lambda: client.recv(10_000), b"")).partition(b"\r\n\r\n")
    return answer, body


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port))


def test_answers_are_sent_at_once():
    """asyncio before Python 3.12 disables Nagle's algorithm only if the socket's protocol is named."""
    with server.listening("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_beyond_as_many_connections_as_files_one_is_told_to_come_back(served: Served, monkeypatch):
    served.wait_until_free()
    with connected(served) as idle:
        time.sleep(0.1)
        monkeypatch.setattr(connections, "most_connections", lambda: 1)
        with connected(served) as further:
            answer, body = heard(further)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable")
        assert b"Retry-After: 1" in answer
        assert is_shaped(body)
        monkeypatch.undo()
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert heard(idle)[0].startswith(b"HTTP/1.1 200")


def test_as_many_files_as_this_process_may_open_are_allowed():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert connections.most_connections() == 200 - connections.OTHER_FILES
        connections.allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_head_has_to_come_whole_in_time_at_first_and_after_an_answer(run, monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 1)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(Service.of(run, "cpu", Limits(slots=1))) as found:
        for first in (b"", request):
            with connected(found) as client:
                client.sendall(first)
                answer = client.recv(10_000) if first else b""
                start = time.monotonic()
                with contextlib.suppress(OSError):
                    while time.monotonic() < start + 10:  # uvicorn by itself would wait for ever
                        client.sendall(b"G")
                        time.sleep(0.05)
                assert time.monotonic() - start < 3, "nobody closed it"
                assert not first or answer.startswith(b"HTTP/1.1 200")
        with connected(found) as patient:  # a request sent in time is answered, however long that takes
            monkeypatch.setattr(guard, "BODY_SECONDS", 3.0)
            body = json.dumps({**GOOD, "max_tokens": 1}).encode()
            patient.sendall(head(len(body)) + body[:-1])
            time.sleep(1.5)
            patient.sendall(body[-1:])
            assert patient.recv(12) == b"HTTP/1.1 200"


def test_bodies_that_arrive_together_are_bounded(run, monkeypatch):
    monkeypatch.setattr(guard, "BODIES_AT_ONCE", 2)
    with serving(Service.of(run, "cpu", Limits(slots=1, body=1000))) as found:
        waiting = [connected(found) for _ in range(2)]
        for client in waiting:
            client.sendall(head(1000) + b" " * 990)
        while found.app.state.guard.arriving < 2 * 990:
            time.sleep(0.01)
        answer = post(found, {**GOOD, "max_tokens": 1})
        assert (answer.status_code, is_shaped(answer.content)) == (429, True)
        assert "too many request bodies are arriving at once" in answer.text
        for client in waiting:
            client.close()
        while found.app.state.guard.arriving:
            time.sleep(0.01)
        assert post(found, {**GOOD, "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_told_before_a_text_is_tokenised(slow_service, monkeypatch):
    with serving(slow_service(0.05, slots=1, queue=0)) as found, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, found, GOOD)
        while not found.service.worker.open:
            time.sleep(0.01)
        monkeypatch.setattr(Service, "prepared", lambda *_: 1 / 0)
        assert post(found, GOOD).status_code == 429
        assert first.result().status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("a.localhost", 200), ("127.0.0.1", 200), ("127.9.9.9:1", 200),
        ("[::1]:8000", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("evil.example:80", 403),
        ("192.168.1.1", 403), ("[::1", 403), ("localhost.", 403), ("", 200),
    ],
)  # fmt: skip
def test_without_a_key_only_this_machines_names_are_answered(served: Served, host, status):
    """Otherwise a web page could use the server by DNS rebinding."""
    answer = httpx2.get(f"{served.url}/v1/models", headers={"Host": host})
    assert answer.status_code == status
    if status == 403:
        assert is_shaped(answer.content)
        assert f"the Host header is {host!r}" in answer.json()["error"]["message"]


def test_with_a_key_any_name_is_answered(run):
    with serving(Service.of(run, "cpu", Limits(slots=1)), "key") as found:
        headers = {"Host": "models.example", "Authorization": "Bearer key"}
        assert httpx2.get(f"{found.url}/v1/models", headers=headers).status_code == 200
