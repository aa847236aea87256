"""bench serve: measurements of our server and of another, and errors."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.shown import every_update
from tests.tiny import tiny
from tokendepth.bench import load, serve
from tokendepth.bench.load import Client, Load, put
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig
from tokendepth.errors import UserError
from tokendepth.runs.results import read_rows
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


class Stock(BaseHTTPRequestHandler):
    """Another server with this API: 10 ms per token, no [DONE], and no usage unless requested."""

    protocol_version, wait, usage, status, end = "HTTP/1.1", threading.Event(), True, 200, "length"

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "/models/stock"}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], asked["temperature"], asked["stream"]) == ("/models/stock", 0, True)
        if self.status != 200:
            self.answer(b'{"error": {"message": "no such model"}}')
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(asked["max_tokens"]):
            self.wait.wait(0.01)
            self.tell({"choices": [{"text": f"{number} "}]})
        usage = {"usage": {"completion_tokens": asked["max_tokens"]}} if self.usage else {}
        self.tell({"choices": [{"text": "", "finish_reason": self.end}], **usage})
        self.close_connection = True

    def tell(self, tree):
        self.wfile.write(b"data: " + json.dumps(tree).encode() + b"\n\n")

    def answer(self, content):
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def stock():
    with ThreadingHTTPServer(("127.0.0.1", 0), Stock) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(serve, "REQUESTS", 4)


def test_every_prompt_is_sent_once_and_times_are_the_clients(stock):
    wanted = Load(clients=2, requests=6, seconds=60, tokens=5)
    assert len(set(wanted.prompts())) == 6
    answers, seconds = put(wanted, Client(stock))
    assert [answer.prompt for answer in answers] == wanted.prompts()
    for answer in answers:
        assert (answer.tokens, answer.text) == (5, "0 1 2 3 4 ")
        assert 0.01 <= answer.first < answer.last <= seconds
        assert answer.last >= 5 * 0.01, "a first token that comes late leaves the others less time"
        assert answer.a_token == pytest.approx((answer.last - answer.first) / 4)
    assert 3 * 0.05 <= seconds < 6 * 0.05 + 5


def test_tokens_are_counted_where_a_server_does_not_tell(stock, monkeypatch):
    monkeypatch.setattr(Stock, "usage", False)
    (answer,), _ = put(Load(1, 1, 60, tokens=4), Client(stock))
    assert answer.tokens == 4


def test_time_ends_a_load(stock):
    answers, _ = put(Load(clients=1, requests=1000, seconds=0.1, tokens=3), Client(stock))
    assert 1 <= len(answers) < 20


@pytest.mark.parametrize(
    ("change", "said"), [({"status": 404}, "answers 404: .*no such model"), ({"end": None}, "a stream .* has no end")]
)
def test_a_server_that_refuses_or_does_not_end_is_no_measurement(stock, monkeypatch, change, said):
    for name, value in change.items():
        monkeypatch.setattr(Stock, name, value)
    with pytest.raises(UserError, match=said):
        put(Load(2, 4, 60), Client(stock, "/models/stock"))


def test_another_server(stock, small, tmp_path, capsys, monkeypatch):
    log = every_update(monkeypatch)
    main(["bench", "serve", "--against", stock, "--server", "stock 1.0", "--clients", "1,2", "--out", str(tmp_path)])
    one, two = read_rows(tmp_path / "serve.json")
    assert (one["server"], one["run"], one["clients"], two["clients"]) == ("stock 1.0", "stock", 1, 2)
    assert one["requests"] == two["requests"] == 4
    assert 1.2 * one["tokens_per_s"] < two["tokens_per_s"] < 100 * 2
    assert one["token_ms"][0] >= 10
    assert one["request_ms"] == sorted(one["request_ms"])
    assert "stock on stock 1.0, dense, 2 clients: " in capsys.readouterr().out
    log.check_told("stock 1.0, 1 clients", "requests")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "bench serve needs a trained run, --run RUN, or another server, --against URL"),
        (["--run", "x", "--against", "http://127.0.0.1:1"], "name one"),
        (["--run", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--against", "ftp://x"], "the server is 'ftp://x'; expected an address such as http://127.0.0.1:8000"),
        (["--against", "http://127.0.0.1:1"], "nothing answers at 127.0.0.1:1 (connection refused); start the server"),
        (["--run", "x", "--clients", "0"], "--clients is '0'; expected whole numbers from 1 to 999"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "serve", *words])
    assert stop.value.code == 2
    answer = capsys.readouterr().err.splitlines()[-1]
    assert said in answer


# --- our own server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    text = " ".join(load.WORDS) + "\n"
    (folder / "words.txt").write_text(text * 20, encoding="utf-8")
    config = tiny(folder, BudgetConfig(), steps=2, context=128, corpus=f"text:{folder / 'words.txt'}")
    return train(config, folder / "words", show=False)


@pytest.mark.slow
@pytest.mark.xdist_group("serve")
def test_rows_of_a_run(run, small, tmp_path, monkeypatch):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    from tests.serve.conftest import serving
    from tokendepth.serve.service import Limits, Service

    begun = []

    @contextlib.contextmanager
    def in_this_process(run, execution, slots, device):
        begun.append((execution, slots))
        limits = Limits(slots=slots, queue=100)
        with serving(Service.of(run, device, limits, execution=execution)) as found:
            assert found.service.engine.execution == execution
            yield Client(found.url, run.name), 1

    monkeypatch.setattr(serve, "started", in_this_process)
    rows = list(serve.measure(run.path, "cpu", tmp_path, (1, 3)))
    assert begun == [("sparse", 3), ("sparse", 1), ("hard", 3), ("hard", 1)]
    assert [(row["slots"], row["clients"]) for row in rows] == [(3, 1), (3, 3), (1, 3)] * 2
    assert read_rows(tmp_path / "serve.json") == rows
    assert all(row["differing_texts"] == 0 and row["requests"] == 4 for row in rows)
    sparse, hard = rows[0], rows[3]
    assert 0 < sparse["flops_skipped"] < 1
    assert hard["flops_skipped"] < 0, "routers cost, and nothing is skipped"
    assert all(row["others_cores"] >= 0 and row["commit"] for row in rows)


@pytest.mark.slow
def test_the_server_is_a_process_of_its_own_and_is_gone_afterwards(run):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    with serve.started(run, "hard", 2, "cpu") as (client, pid):
        assert client.model == "words"
        (answer,), _ = put(Load(1, 1, 60, tokens=3), client)
        assert answer.tokens == 3
        before = serve._Clock.read(pid)
        assert before.everyone > before.ours > 0
    with pytest.raises(UserError, match="nothing answers"):
        client.get("/health")


def test_a_server_that_does_not_start_is_one_line(run, monkeypatch):
    monkeypatch.setattr(serve.sys, "executable", "/bin/false")
    wanted = pytest.raises(UserError, match=r"the server ended before it served; .* tokendepth serve")
    with wanted, serve.started(run, "sparse", 1, "cpu"):
        pass
