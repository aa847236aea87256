"""The server's part of the fault-injection suite in miniature, and that its functions notice a server that fails."""

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("openai", reason="the openai client is not installed")

from uvicorn.protocols.http.h11_impl import H11Protocol

from benchmarks.faults import crowds, defaults, malformed, rude, servers
from benchmarks.faults.outcome import Outcome
from benchmarks.faults.registry import FAULTS
from tests.benchmarks.test_faults import OF_SERVERS, nothing
from tests.serve.conftest import serving
from tokendepth.runs.run import Run
from tokendepth.serve import app, asked, connections, guard, server
from tokendepth.serve.errors import Refusal
from tokendepth.serve.service import Limits, Service
from tokendepth.serve.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server faults")]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return servers.run_to_serve(tmp_path_factory.mktemp("run"))


@contextlib.contextmanager
def in_this_process(run: Run, *words: str) -> Iterator[servers.Served]:
    """A server in this process: it has a test's patches, too, and starts at once."""
    options = {name.removeprefix("--"): float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    sizes = {name: int(options[name]) for name in ("slots", "queue") if name in options}
    with serving(Service.of(run, "cpu", Limits(**sizes, seconds=options.get("seconds", 120.0)))) as found:
        yield servers.Served(found.port, os.getpid())


@pytest.fixture(autouse=True)
def _small(run, monkeypatch):
    monkeypatch.setattr(servers, "run_to_serve", lambda folder: run)
    monkeypatch.setattr(servers, "serving", in_this_process)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(connections, "READ_SECONDS", 0.5)
    monkeypatch.setattr(server, "IDLE_SECONDS", 1)
    for module in (crowds, rude):
        monkeypatch.setattr(module, "SLACK_S", 1.5)
    monkeypatch.setattr(crowds, "ROUNDS", 1)
    monkeypatch.setattr(crowds, "RATE", 100.0)
    monkeypatch.setattr(crowds, "REQUESTS_AMONG_THEM", 2)


def tried(name: str, folder, count: int | None = None) -> Outcome:
    return FAULTS[name].inject(folder, count or OF_SERVERS[name], nothing)


@pytest.mark.parametrize("name", OF_SERVERS)
def test_nothing_is_lost(name, tmp_path, monkeypatch):
    if name == "overload":
        monkeypatch.setattr(servers, "TOKENS", 60)
    outcome = tried(name, tmp_path)
    assert outcome.failures == []
    assert outcome.attempts >= OF_SERVERS[name]
    assert not outcome.says


# --- the measurement can fail -----------------------------------------------------------------------------------------


def test_a_fault_of_the_server_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(asked, "_short", lambda value: 1 / 0)
    monkeypatch.setattr(guard, "log_fault", nothing)
    failures = tried("malformed", tmp_path, 30).failures
    assert any(failure.endswith(": 500") for failure in failures)


def test_errors_in_another_shape_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "Connection", H11Protocol)
    failures = tried("malformed", tmp_path, 1).failures
    assert len(failures) >= len(malformed.NOT_HTTP) - 3
    assert all(failure.startswith("not HTTP") for failure in failures)


def test_a_queue_without_a_bound_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(crowds, "ROOMS", ((1, 0),))
    monkeypatch.setattr(servers, "TOKENS", 40)
    monkeypatch.setattr(Worker, "full", False)
    real = Worker.__init__
    monkeypatch.setattr(Worker, "__init__", lambda self, engine, **rest: real(self, engine, **{**rest, "queue": 99}))
    assert any("ran or waited at once" in failure for failure in tried("overload", tmp_path).failures)


def test_a_refusal_without_a_time_to_come_back_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(crowds, "ROOMS", ((1, 0),))
    monkeypatch.setattr(app, "busy", lambda *_: Refusal(429, "busy"))
    assert any("refused by 429" in failure for failure in tried("overload", tmp_path).failures)


def test_a_leak_is_noticed(tmp_path, monkeypatch):
    leaked, real = [], Service.prepared

    def leaking(self, asked):
        leaked.append(b"x" * crowds.FLAT)
        return real(self, asked)

    monkeypatch.setattr(Service, "prepared", leaking)
    (failure,) = tried("soak", tmp_path, 8).failures
    assert failure.startswith("memory grew by")


def test_a_slot_that_is_not_freed_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "cancel", nothing)
    monkeypatch.setattr(rude, "AT_ONCE_S", 0.3)
    monkeypatch.setattr(rude, "QUICK", {"gone": rude.QUICK["gone while it is written"]})
    monkeypatch.setattr(rude, "_slow_ones", nothing)
    (failure,) = tried("rude-clients", tmp_path, 5).failures
    assert failure.startswith("gone: its slot was taken for")


def test_connections_that_are_never_closed_are_noticed(tmp_path, monkeypatch):
    """uvicorn's own protocol never closes one without a request, or whose response is not read."""
    for module in (crowds, rude):
        monkeypatch.setattr(module, "SLACK_S", 0.2)  # it would not close them later either
    monkeypatch.setattr(server, "Connection", H11Protocol)
    (failure,) = tried("connections", tmp_path, 3).failures
    assert failure == "3 of 3 idle connections are still open"
    monkeypatch.setattr(rude, "QUICK", {"reset": rude.QUICK["reset"]})
    (failure,) = tried("rude-clients", tmp_path, 4).failures
    assert failure.startswith("3 of 4 slow clients are still connected")


def test_answers_that_a_browser_may_execute_and_names_of_the_web_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_is_loopback", lambda name: True)
    real = guard.refused

    def as_a_page(refusal):
        answer = real(refusal)
        answer.headers["content-type"] = "text/html"
        return answer

    monkeypatch.setattr(guard, "refused", as_a_page)
    failures = tried("server-defaults", tmp_path, 1).failures
    assert any("'text/html'" in failure for failure in failures)
    assert any("to the name evil.example" in failure for failure in failures)


def test_code_that_would_be_executed_is_noticed(tmp_path):
    (tmp_path / "offender.py").write_text("load(path, trust_remote_code=x)\n", encoding="utf-8")
    assert defaults._trusting(tmp_path) == ["offender.py:1"]


def test_texts_that_a_stopped_server_cuts_off_are_noticed(tmp_path, monkeypatch):
    """One that does not wait for what it has accepted."""
    hasty = "import sys; from tokendepth.serve import server; server.GRACE_SECONDS = 0; "
    hasty += "from tokendepth.cli.main import main; main(sys.argv[3:])"
    popen = servers.subprocess.Popen

    class Hasty(popen):
        def __init__(self, command, **rest):
            super().__init__([sys.executable, "-c", hasty, *command[1:]], **rest)

    monkeypatch.setattr(servers.subprocess, "Popen", Hasty)
    monkeypatch.setattr(rude, "STOPS", (rude.signal.SIGTERM,))
    # Of the requests in flight at that moment only streams are cut, and one may end by itself just then.
    tries = (tried("server-restart", tmp_path, 1).failures for _ in range(5))
    assert any(failure.startswith("SIGTERM: {'cut'") for failures in tries for failure in failures)
