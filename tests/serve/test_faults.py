"""The server survives bad requests, too many requests, clients that disconnect, and signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import tokendepth as td
from benchmarks.faults.malformed import attack, is_shaped
from tests.cli.test_mistakes import refused
from tests.serve.conftest import Served, serving
from tokendepth.infer.engine import Engine
from tokendepth.serve import guard, server
from tokendepth.serve.service import Limits, Service

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.slow]
GOOD = {"model": "bottles", "prompt": "green", "max_tokens": 40, "temperature": 0}


def post(served: Served, body: dict, path: str = "/v1/completions", **options) -> httpx2.Response:
    return httpx2.post(served.url + path, json=body, timeout=30, **options)


def head(length: int) -> bytes:
    headers = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *headers, "", ""]).encode()


def healthy(served: Served) -> bool:
    return httpx2.get(f"{served.url}/health", timeout=5).status_code == 200


# --- bad requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"proompt": 1}, 400, "proompt", "unknown field 'proompt'; did you mean 'prompt'?"),
        ({"model": "cans"}, 404, "model", "model 'cans' is not served here; this server has only 'bottles'"),
        ({"model": None}, 400, "model", "model is null; expected the name of this server's model, 'bottles'"),
        ({"prompt": "g" * 64}, 400, "prompt", "has 64 tokens; expected fewer than this model's context of 64"),
        ({"prompt": ""}, 400, "prompt", "prompt is ''; expected a string, a list of token ids"),
        ({"prompt": [1, "a"]}, 400, "prompt", "prompt is [1, 'a']; expected a string"),
        ({"prompt": [10**6]}, 400, "prompt", "token id 1000000 is out of range; expected 0 to"),
        ({"prompt": "\N{SNOWMAN}"}, 400, "prompt", "the character '\N{SNOWMAN}' at position 0"),
        ({"budget": 0.33}, 400, "budget", "budget is 0.33; expected one of 0.4, 0.8; tokendepth calibrate adds"),
        ({"budget": 1.5}, 400, "budget", "budget is 1.5; expected a number above 0 up to 1"),
        ({"max_tokens": 60}, 400, "max_tokens", "max_tokens is 60, but the context of 64 has room for 59"),
        ({"max_tokens": 5000}, 400, "max_tokens", "max_tokens is 5000; expected at most 4096 on this server"),
        ({"max_tokens": True}, 400, "max_tokens", "max_tokens is True; expected a whole number from 1 to"),
        ({"temperature": 2.5}, 400, "temperature", "temperature is 2.5; expected a number from 0 to 2"),
        ({"temperature": 1e-5}, 400, "temperature", "temperature is 1e-05; expected 0, or a number from 0.001 to 2"),
        ({"temperature": "warm"}, 400, "temperature", "temperature is 'warm'; expected a number from 0 to 2"),
        ({"top_p": 0}, 400, "top_p", "top_p is 0; expected a number above 0 up to 1"),
        ({"n": 9}, 400, "n", "n is 9; expected a whole number from 1 to 8"),
        ({"n": 8, "prompt": ["a", "b"]}, 400, "n", "the request needs 16 completions; expected at most 12, the"),
        ({"stop": ["a"] * 5}, 400, "stop", "expected up to 4 strings of 1 to 1000 characters"),
        ({"stop": ""}, 400, "stop", "stop is ''"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "logit_bias is {'x': 1}; expected an object of token ids"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "logit_bias has token id 99999; expected 0 to"),
        ({"echo": True}, 400, "echo", "echo is True, which this server does not support; leave it out"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "only if stream is true"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_message(served: Served, change, status, param, said):
    answer = post(served, {**GOOD, **change})
    assert is_shaped(answer.content)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert said in error["message"]
    served.wait_until_free()


def test_what_the_api_knows_and_asks_for_nothing_is_no_mistake(served: Served):
    harmless = {"user": "me", "best_of": 1, "echo": False, "suffix": None, "n": None, "stop": None, "logit_bias": None}
    assert post(served, {**GOOD, **harmless}).status_code == 200


def test_malformed_requests_are_refused_in_the_apis_shape(served: Served):
    found = attack(served.url, "bottles", count=120)
    assert not found.faults, "\n".join(found.faults[:5])
    assert found.requests == 120
    assert sum(n for status, n in found.statuses.items() if status in (400, 404, 405, 415)) > 60
    assert healthy(served)
    served.wait_until_free()


def test_a_model_without_a_dial_has_no_budget(served: Served, monkeypatch):
    monkeypatch.setattr(served.service, "budgets", {})
    error = post(served, {**GOOD, "budget": 0.4}).json()["error"]
    assert error["message"] == "budget was given, but this model has no budget to set; leave it out"


def test_a_body_that_is_too_large_is_cut_off_whether_it_says_its_length_or_not(run):
    with serving(Service.of(run, "cpu", Limits(slots=1, body=1000))) as found:
        sent = []

        def endless():
            for _ in range(10_000):
                sent.append(1)
                yield b" " * 1000

        json_type = {"Content-Type": "application/json"}
        assert post(found, {**GOOD, "prompt": "g" * 2000}).status_code == 413
        try:
            answer = httpx2.post(f"{found.url}/v1/completions", content=endless(), headers=json_type, timeout=30)
            assert (answer.status_code, is_shaped(answer.content)) == (413, True)
        except httpx2.TransportError:  # the server closed the connection while we were writing
            pass
        assert len(sent) < 10_000
        assert healthy(found)


def test_a_body_that_does_not_come_is_not_waited_for(served: Served, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(head(50) + b"{")
        client.settimeout(10)
        answer = b"".join(iter(lambda: client.recv(10_000), b""))  # head and body may arrive separately
    assert answer.startswith(b"HTTP/1.1 408")
    assert is_shaped(answer.split(b"\r\n\r\n", 1)[1])


# --- too many, too long -----------------------------------------------------------------------------------------------


def test_beyond_the_queue_requests_are_answered_429_and_the_accepted_ones_complete(run, slow_service):
    expected = td.generate(run, "green", tokens=40, temperature=0, device="cpu").text
    with serving(slow_service(0.01, slots=1, queue=4)) as found, ThreadPoolExecutor(41) as pool:
        answers = pool.map(lambda n: post(found, {**GOOD, "stream": n % 2 == 1}), range(40))
        health = pool.submit(lambda: [healthy(found) for _ in range(10)])
        answers = list(answers)
        assert all(health.result())
        accepted = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(accepted) + len(refused) == 40
        assert 5 <= len(accepted) < 40
        for answer in accepted:
            if answer.headers["content-type"].startswith("text/event-stream"):
                chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
                assert chunks[-1] == "[DONE]"
                text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])
            else:
                text = answer.json()["choices"][0]["text"]
            assert text == expected
        for answer in refused:
            assert is_shaped(answer.content)
            assert answer.headers["retry-after"] == "1"
        found.wait_until_free()


def test_time_ends_a_text_and_refuses_who_never_got_a_slot(slow_service):
    with serving(slow_service(0.02, slots=1, queue=1, seconds=0.4)) as found, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, found, {**GOOD, "max_tokens": 59})
        time.sleep(0.1)
        second = pool.submit(post, found, {**GOOD, "stream": True})
        choice = first.result().json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert 0 < first.result().json()["usage"]["completion_tokens"] < 59
        found.wait_until_free()
        late = second.result()
        assert late.status_code == 429 or '"finish_reason":"length"' in late.text


# --- clients that disconnect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(slow_service, stream):
    with serving(slow_service(0.05, slots=1, queue=0)) as found:
        body = json.dumps({**GOOD, "max_tokens": 59, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", found.port)) as client:
            client.sendall(head(len(body)) + body)
            while not found.service.worker.open:
                time.sleep(0.01)
            if stream:
                assert b"200 OK" in client.recv(100)
        found.wait_until_free()
        text = post(found, {**GOOD, "max_tokens": 1}).json()["choices"][0]["text"]
        assert len(text) == 1, "the slot serves the next one"
        assert "tokendepth_dropped_total 1.0\n" in found.service.metrics.text()


def test_a_server_that_cannot_wait_any_longer_says_so(slow_service, monkeypatch):
    monkeypatch.setattr(server, "GRACE_SECONDS", 0)
    with ThreadPoolExecutor(1) as pool:
        with serving(slow_service(0.05, slots=1)) as found:
            answer = pool.submit(post, found, {**GOOD, "max_tokens": 59})
            while not found.service.worker.open:
                time.sleep(0.01)
        assert (answer.result().status_code, is_shaped(answer.result().content)) == (503, True)


# --- internal errors --------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_told_without_the_prompt_and_the_next_request_is_served(run, monkeypatch, capfd):
    step = Engine.step
    with serving(Service.of(run, "cpu", Limits(slots=2))) as found:

        def broken(self):
            raise RuntimeError(f"cannot continue {self._waiting!r} green")

        monkeypatch.setattr(Engine, "step", broken)
        answer = post(found, GOOD)
        assert (answer.status_code, is_shaped(answer.content)) == (500, True)
        monkeypatch.setattr(Engine, "step", step)
        found.wait_until_free()
        assert post(found, GOOD).status_code == 200
    said = capfd.readouterr().err
    assert "tokendepth: RuntimeError at test_faults.py" in said
    assert "green" not in said


def test_nothing_of_a_request_is_logged(served: Served, capfd):
    for body in (GOOD, {**GOOD, "prompt": "bottles\N{SNOWMAN}"}, {**GOOD, "stream": True}):
        post(served, body)
    httpx2.post(f"{served.url}/v1/completions", content=b"{green", headers={"Content-Type": "application/json"})
    assert capfd.readouterr() == ("", "")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "--port is 70000; expected a number from 0 to 65535"),
        (
            ["--host", "no.such.host.invalid"],
            "--host is 'no.such.host.invalid'; expected a host name or address of this",
        ),
        (["--slots", "0"], "slots is 0; expected a number from 1 to 4096; set it with --slots"),
        (["--seconds", "nan"], "seconds is nan; expected a number from 0.1 to"),
    ],
)
def test_an_option_that_makes_no_sense(run, words, said, capsys):
    assert said in refused(capsys, "serve", str(run.path), *words)


def test_a_port_in_use_and_a_run_that_is_none(run, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(capsys, "serve", str(run.path), "--port", port)
    assert line == f"cannot listen on port {port} of 127.0.0.1 (address already in use); choose another with --port"
    assert "nowhere" in refused(capsys, "serve", str(tmp_path / "nowhere"), "--port", "0")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_lets_finish_what_is_in_flight_and_nothing_new_is_taken(run, number, code):
    command = [sys.executable, "-m", "tokendepth", "serve", str(run.path), "--port", "0", "--slots", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving bottles at (http://127\.0\.0\.1:\d+)/v1; press Ctrl-C to stop\n", line)
        assert found
        url = found[1]
        body = {**GOOD, "prompt": ["green"] * 12, "max_tokens": 59}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=60)
            while "tokendepth_running 1" not in httpx2.get(f"{url}/metrics").text:
                time.sleep(0.01)
            os.kill(process.pid, number)
            assert [len(choice["text"]) for choice in answer.result().json()["choices"]] == [59] * 12
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{url}/health")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, "")
        assert all(line.startswith("loading ") for line in err.splitlines()), err
    finally:
        process.kill()
