"""stdout and stderr that vanish, fill up or were never there: no run is lost, and no command answers by a traceback."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny, write_corpus
from tokendepth import streams
from tokendepth.config import to_dict
from tokendepth.errors import ReaderGone, UserError
from tokendepth.progress import Progress
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

pytestmark = pytest.mark.xdist_group("streams")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60
TINY = [
    *("--model.d-model", "32", "--model.n-layer", "3", "--model.n-head", "4", "--model.d-ff", "64"),
    *("--model.context", "16", "--train.batch-size", "4", "--train.device", "cpu", "--train.checkpoint-every", "1000"),
]

# Importing torch takes seconds, so one process does it, trains once so that everything is loaded, and forks another for
# every command. That one ends as any interpreter does, with its own flush of what is still buffered.
SERVER = """
import gc, json, os, sys

from tokendepth import progress, streams
from tokendepth.cli.main import main
from tokendepth.config import from_dict
from tokendepth.training.loop import train

def send(descriptor, where):
    if where == "gone":
        reader, target = os.pipe()
        os.close(reader)
    elif where == "stalled":  # full, and its reader does not read
        reader, target = os.pipe()
        os.set_blocking(target, False)
        try:
            while os.write(target, bytes(4096)):
                pass
        except BlockingIOError:
            os.set_blocking(target, True)
    else:
        target = os.open(where, os.O_RDWR | os.O_CREAT)
    os.dup2(target, descriptor)
    return open(descriptor, "w", buffering=1 if descriptor == 2 else -1, closefd=False)

warm = json.loads(sys.stdin.readline())
train(from_dict(warm["config"]), warm["out"], show=False)
gc.freeze()  # else each one looks for garbage among all of torch's objects before it ends
streams.PATIENCE_S = 0.01
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        if order["terminal"]:
            os.setsid()  # the next terminal to be opened is its own
        sys.stdout = sys.__stdout__ = send(1, order["stdout"])
        sys.stderr = sys.__stderr__ = send(2, order["stdout"] if order["stderr"] == "stdout" else order["stderr"])
        progress.console.is_interactive = sys.stderr.isatty()  # rich asks once, at the import
        main(order["arguments"])
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
"""


class Server:
    """Runs command lines; returns their exit codes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._order({"config": to_dict(tiny(folder, steps=2)), "out": str(folder / "warm")})

    def _order(self, order: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def start(self, *arguments: object, stdout: str = "", stderr: str = "", terminal: bool = False) -> None:
        """stdout and stderr: "gone", "stalled", a path, or by default a file; see `out` and `err`."""
        for name in ("out", "err"):
            (self.folder / name).write_bytes(b"")
        order = {"stdout": stdout or str(self.folder / "out"), "stderr": stderr or str(self.folder / "err")}
        self._order(order | {"arguments": list(map(str, arguments)), "terminal": terminal})

    def code(self) -> int:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the command does not end"
        return int(self.process.stdout.readline())

    def run(self, *arguments: object, **where: str) -> int:
        self.start(*arguments, **where)
        return self.code()

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    assert server.process.stdin
    assert server.process.stdout
    server.process.stdin.close()
    server.process.stdout.close()
    server.process.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    return ["--data.corpus", write_corpus(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return train(tiny(folder, steps=2, context=300), folder / "run", show=False).path


# --- training continues, and saves ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ({"stderr": "gone"}, 0),
        ({"stderr": "/dev/full"}, 0),
        ({"stderr": "stalled"}, 0),
        ({"stdout": "gone"}, 141),
        ({"stdout": "/dev/full"}, 2),
        ({"stdout": "gone", "stderr": "stdout"}, 141),
        ({"stdout": "/dev/full", "stderr": "stdout"}, 2),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_training_to_which_nobody_listens_is_finished(server, corpus, where, code, tmp_path):
    """What cannot be said at its end decides about the exit code, not about the run."""
    arguments = ["train", "demo.tsa", *corpus, *TINY, "--train.steps", 4, "--train.eval-every", 2]
    assert server.run(*arguments, "--out", tmp_path / "run", **where) == code
    run = Run.open(tmp_path / "run")
    run.verify()
    assert [row["step"] for row in run.metrics() if "val_loss" in row] == [2, 4]
    assert "Traceback" not in server.err
    assert "Exception ignored" not in server.err


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, str]]:
    """What a terminal window holds, to be closed by the test; and the name by which programs open it."""
    window, program = pty.openpty()
    yield window, os.ttyname(program)
    os.close(program)


def wait_for(pattern: bytes, window: int) -> None:
    heard = b""
    while not re.search(pattern, heard):
        ready, _, _ = select.select([window], [], [], PATIENCE_S)
        assert ready, heard
        heard += os.read(window, 1000)


def test_a_training_goes_on_when_its_terminal_is_gone(server, corpus, tmp_path):
    """A terminal that is not its own sends no signal; writing to it fails (EIO)."""
    arguments = ["train", "demo.tsa", *corpus, *TINY, "--train.steps", 40, "--out", tmp_path / "run"]
    with terminal() as (window, name):
        server.start(*arguments, stderr=name)
        wait_for(rb"/40 steps", window)
        os.close(window)
    assert server.code() == 0
    assert Run.open(tmp_path / "run").finished


def test_a_closed_terminal_stops_its_training_and_nothing_is_lost(server, corpus, tmp_path):
    """Its own terminal sends SIGHUP; no one is left to read a message."""
    steps = 100_000
    arguments = ["train", "demo.tsa", *corpus, *TINY, "--train.steps", steps, "--out", tmp_path / "run"]
    with terminal() as (window, name):
        server.start(*arguments, stderr=name, terminal=True)
        wait_for(rb"[1-9]/100,000 steps", window)
        os.close(window)
    assert server.code() == 128 + 1
    checkpoint, _ = Run(tmp_path / "run").load_checkpoint()
    assert checkpoint is not None
    assert 0 < checkpoint.step < steps


@pytest.mark.slow
def test_a_training_whose_first_line_was_enough_is_finished(corpus, tmp_path):
    """As it is typed."""
    command = [sys.executable, "-m", "tokendepth", "train", "demo.tsa", *corpus, *TINY, "--train.steps", "4"]
    line = " ".join([*command, "--out", str(tmp_path / "run"), "2>&1 | head -1; exit ${PIPESTATUS[0]}"])
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.returncode == 141
    assert Run.open(tmp_path / "run").finished


def test_from_python_too_a_training_needs_no_listener(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        monkeypatch.setattr(sys, "__stderr__", gone)
        with pytest.raises(BrokenPipeError):
            os.write(gone.fileno(), b"x")
        assert train(tiny(tmp_path), tmp_path / "run").finished
        with Progress("evaluating", 3) as progress:
            progress.advance()
            print("a note", file=sys.stderr)
        assert sys.stderr is gone, "what was replaced for the time being is put back"


# --- every other command ----------------------------------------------------------------------------------------------

COMMANDS = {
    "help": ["train", "--help"],
    "evaluate": ["evaluate", "RUN", "--no-timing"],
    "generate": ["generate", "RUN", "--tokens", "3"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_output_cannot_be_written_says_so_without_a_traceback(server, trained, command):
    arguments = [str(trained) if word == "RUN" else word for word in COMMANDS[command]]
    assert server.run(*arguments, stdout="gone") == 141, server.err
    assert "Traceback" not in server.err
    assert "Exception ignored" not in server.err
    assert server.run(*arguments, stdout="/dev/full") == 2
    line = "tokendepth: stdout cannot be written (No space left on device); "
    assert any(words.startswith(line) for words in server.err.splitlines()), server.err
    assert "Exception ignored" not in server.err


@pytest.mark.parametrize(("where", "code"), [("gone", 141), ("/dev/full", 2)])
def test_an_evaluation_that_nobody_reads_is_kept(server, trained, where, code):
    """Its JSON is longer than the buffer, so that printing it fails at once."""
    (trained / "eval.json").unlink(missing_ok=True)
    assert server.run("evaluate", trained, "--json", "--no-timing", stdout=where) == code
    evaluation = Run.open(trained).evaluation
    assert evaluation
    assert len(json.dumps(evaluation)) > io.DEFAULT_BUFFER_SIZE


@pytest.mark.parametrize("where", ["gone", "/dev/full", "stalled"])
def test_a_command_does_without_stderr(server, trained, where):
    assert server.run("generate", trained, "--tokens", 3, stderr=where) == 0, "it says there what the tokens cost"
    assert len(server.out) >= 3
    assert server.run("trian", stderr=where) == 2


@pytest.mark.parametrize(
    ("redirection", "code"),
    [(">/dev/full", 2), ("2>/dev/full", 0), (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), ("| true", 141)],
)
def test_the_shells_own_redirections(redirection, code):
    """A shell can close a stream before the interpreter looks at it: whoever does that wants no output."""
    line = f"{sys.executable} -m tokendepth --version {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (redirection == ">/dev/full"), done.stderr


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path):
    """Otherwise what a library writes to stderr would end up in the next checkpoint."""
    script = (
        "import os, sys; from tokendepth.streams import standard_streams\n"
        "with standard_streams(), open(sys.argv[1], 'w') as file:\n"
        "    print('to stdout'); print('to stderr', file=sys.stderr); os.system('echo from a child >&2')\n"
        "    file.write(str(file.fileno()))"
    )
    line = f'{sys.executable} -c "{script}" {tmp_path / "file"} <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line], cwd=ROOT).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2


# --- the streams themselves -------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_slow_reader_of_stdout_gets_everything(pipe):
    """Even if another program that shares the pipe has made it non-blocking."""
    reader, writer = pipe
    os.set_blocking(writer, False)
    sent, received = os.urandom(1 << 20), bytearray()

    def read() -> None:
        while part := os.read(reader, 5000):
            received.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    with io.BufferedWriter(streams._Stdout(writer, "w")) as stdout:
        stdout.write(sent)
    thread.join(timeout=30)
    assert received == sent


def test_a_reader_of_stderr_that_stands_still_does_not_stop_the_work(pipe, monkeypatch):
    monkeypatch.setattr(streams, "PATIENCE_S", 0.01)
    reader, writer = pipe
    room = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    stderr = streams._Stderr(writer, "w", closefd=False)
    assert stderr.write(bytes(3 * room)) == 3 * room
    os.read(reader, room)
    stderr.write(b"again")
    assert os.read(reader, room).endswith(b"again"), "once it reads, it hears"


def test_stdout_fails_once_and_is_quiet_then(pipe):
    reader, writer = pipe
    os.close(reader)
    stdout = streams._Stdout(writer, "w", closefd=False)
    with pytest.raises(ReaderGone):
        stdout.write(b"x")
    assert stdout.write(b"what is flushed at exit") == 23
    with open("/dev/full", "wb") as full, pytest.raises(UserError, match="No space left on device"):
        streams._Stdout(full.fileno(), "w", closefd=False).write(b"x")
