"""Mistakes in the environment, the terminal and the installation: one line each, as for those on the command line."""

import errno
import itertools
import os
import resource
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from paper.__main__ import PAPER
from tests.tiny import tiny, write_corpus
from tokendepth.cli.arguments import Program
from tokendepth.cli.doctor import EXTRAS
from tokendepth.cli.main import TOKENDEPTH, main, parse, program
from tokendepth.config import BudgetConfig
from tokendepth.errors import Interrupted, UserError
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return train(tiny(folder, BudgetConfig(), steps=1), folder / "run", show=False)


def refused(capsys, *arguments: str, of: Program = TOKENDEPTH) -> str:
    """The one line that a mistake is answered with."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments), of)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("tokendepth: ")


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", ["1e-40", "1e-320", "nan", "inf", "-inf", "-0.1", "101"])
def test_a_temperature_that_gives_no_probabilities(temperature, run, capsys):
    line = refused(capsys, "generate", str(run.path), "--temperature", temperature)
    assert line == f"--temperature is {float(temperature)}; expected 0, or a number from 0.001 to 100"


@pytest.mark.parametrize("temperature", ["0", "0.001", "100"])
def test_the_temperatures_at_the_ends(temperature, run, capsys):
    main(["generate", str(run.path), "--prompt", "green", "--temperature", temperature, "--tokens", "3"])
    assert capsys.readouterr().out.startswith("green")


@pytest.mark.parametrize(
    ("of", "words", "said"),
    [
        (
            BENCHMARKS,
            ["faults", "--scale", "2", "--only", ""],
            "--only has '': no such fault; expected one of connections, ",
        ),
        (BENCHMARKS, ["faults", "--scale", "2", "--only", "kill,"], "--only has '': no such fault"),
        (PAPER, ["reproduce", "all", "--seeds", "100000000"], "--seeds is 100000000; expected a number from 1 to 1000"),
        (PAPER, ["compare", "--seeds", "0"], "--seeds is 0; expected a number from 1 to 1000"),
        (TOKENDEPTH, ["bench", "forward", "--batches", "9" * 30], "expected whole numbers from 1 to 999999"),
        (TOKENDEPTH, ["bench", "forward", "--processes", "9" * 30], "expected a number from 1 to 1000"),
        (TOKENDEPTH, ["train", "demo.tsa", "--train.steps", "1e30"], "train.steps is '1e30'; expected a whole number"),
        (TOKENDEPTH, ["train", "demo.tsa", "--train.steps", "9" * 5000], "more characters]999"),
        (TOKENDEPTH, ["evaluate", "a\0b"], r"'a\x00b' has a character that is not allowed in text or file names"),
        (TOKENDEPTH, ["report", "x", "--out", "\ud800"], r"'\ud800' has a character that is not allowed in text"),
        (TOKENDEPTH, ["report", "x", "--out", "a/" * 600], "too long for a name on this disk"),
        (TOKENDEPTH, ["evaluate", "a b " * 300], "the run folder is 'a b "),
    ],
)
def test_odd_values(of, words, said, capsys):
    assert said in refused(capsys, *words, of=of)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "1.2"], "--budget is 1.2; expected a number above 0 and up to 1"),
        (
            ["--method", "drop", "--begin", "1"],
            "--begin is an option of --method span, but the method is drop; drop it",
        ),
        (["--train.steps", "0"], "train.steps is 0; expected"),
        (["--rank", "0"], "rank is 0; expected a number from 1 to 100000; set it with --rank"),
        (["--distill", "2"], "distill is 2.0; expected a number from 0 to 1; set it with --distill"),
        (["--routers-first", "2"], "set it with --routers-first"),
        (["--no-bypass", "--method", "drop"], "--no-bypass is an option of --method span"),
        (["--router", "foo"], "router is 'foo'; expected one of kl, teacher, loss, update, straight, dice"),
        (["--router", "dice", "--method", "drop"], "--router is 'dice', but the method is drop"),
    ],
    ids=" ".join,
)
def test_options_of_a_retrofit_that_do_not_fit_each_other(words, said, capsys):
    assert said in refused(capsys, "retrofit", "run", "--out", "x", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["training", "--fractions", "7"],
            "--fractions is an option of bench forward and decode, not of bench training",
        ),
        (
            ["serve", "--run", "r", "--processes", "2"],
            "--processes is an option of bench forward, not of bench serve; drop it",
        ),
        (["decode", "--corpus", "text:x"], "--corpus is a text for a run; name the run with --run, or drop --corpus"),
        (["forward", "--run", "r", "--shapes", "paper"], "--shapes is for random decisions, and a run has its own"),
    ],
    ids=" ".join,
)
def test_options_of_another_benchmark(words, said, capsys):
    assert said in refused(capsys, "bench", *words)


@pytest.mark.parametrize("router", ["dice", "teacher", "None"])
def test_a_router_can_be_named(router):
    command = parse(["retrofit", "run", "--out", "x", "--router", router])
    assert command.router == (None if router == "None" else router)


def test_too_many_tokens(run, capsys):
    assert "expected a number from 1 to 1000000000" in refused(capsys, "generate", str(run.path), "--tokens", "9" * 30)


def test_a_program_of_one_command_reads_its_options(capsys):
    alone = program("python -m benchmarks", "", (BENCHMARKS.commands["faults"],))
    with pytest.raises(SystemExit) as stop:
        main(["--help"], alone)
    assert not stop.value.code
    assert "python -m benchmarks faults [-h] [--only" in capsys.readouterr().out
    assert "--scale is 2" in refused(capsys, "faults", "--scale", "2", of=BENCHMARKS)


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "abc"}, "RANK is 'abc'; expected a whole number below WORLD_SIZE (1)"),
        ({"RANK": "1"}, "RANK is '1'; expected a whole number below WORLD_SIZE (1)"),
        ({"WORLD_SIZE": "2"}, "RANK is not set; expected a whole number below WORLD_SIZE (2)"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is '2'; expected a whole number below WORLD_SIZE (2)"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; expected a whole number from 1 up"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; expected a whole number from 1 up"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''; expected a whole number from 1 up"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set; expected the machine of the first process"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
            "MASTER_PORT is '99999'; expected a whole number up to 65535",
        ),
    ],
)
def test_an_environment_that_torchrun_would_not_set(variables, said, capsys, monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refused(capsys, "train", "demo.tsa", "--out", str(tmp_path / "run"))
    assert f"the environment variable {said}" in line
    assert line.endswith("start the processes with torchrun, or unset WORLD_SIZE and RANK")
    assert not (tmp_path / "run").exists()


def test_a_port_at_which_somebody_else_listens(capsys, monkeypatch, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ranks = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        line = refused(capsys, "train", "demo.tsa", "--out", str(tmp_path / "run"))
    assert f"MASTER_PORT is '{port}'; expected a port that is free, but another program listens there" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/dev/urandom"),
        OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
        ImportError("libtorch.so: cannot open shared object file: Too many open files", name="torch"),
        UserError("cannot write runs/x: Too many open files; choose another folder"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_many_open_files(error, capsys, monkeypatch):
    def exhausted(*_, **__):
        raise error

    monkeypatch.setattr("tokendepth.training.loop.train", exhausted)
    assert "too many files are open; what was saved is intact; raise the limit" in refused(capsys, "train", "demo.tsa")


@pytest.mark.slow
def test_a_shell_that_allows_few_files(tmp_path):
    """Six: enough to start Python and to load PyTorch, too few to train."""
    words = ["train", "demo.tsa", "--data.corpus", write_corpus(tmp_path), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "tokendepth", *words],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6)),
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ulimit -n 1024" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("columns", ["1", "3"])
def test_help_in_a_narrow_terminal_ends(columns):
    done = subprocess.run(
        [sys.executable, "-m", "tokendepth", "--help"],
        env={**os.environ, "COLUMNS": columns},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "evaluate" in done.stdout


@pytest.mark.parametrize("stopped", [Interrupted(2, 7, "runs/x"), KeyboardInterrupt()])
@pytest.mark.parametrize("command", [["compare"], ["reproduce", "synthetic"]])
def test_a_study_that_is_interrupted_recommends_no_option_it_does_not_have(
    command, stopped, capsys, monkeypatch, tmp_path
):
    def interrupted(*_, **__):
        raise stopped

    monkeypatch.setattr("tokendepth.training.sweep.train_and_evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        main([*command, "--quick", "--out", str(tmp_path)], PAPER)
    assert stop.value.code == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"tokendepth: SIGINT: every run in {tmp_path} is saved; repeat the command to continue"


# --- the installation -------------------------------------------------------------------------------------------------

HIDING = """
import sys
hidden, *arguments = sys.argv[1:]
sys.modules.update(dict.fromkeys(hidden.split(",")))
from tokendepth.cli.main import main
main(arguments)
"""


def without(modules: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", HIDING, modules, *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "words", "extra"),
    [
        ("matplotlib", ["report", "RUN"], "report"),
        ("jinja2", ["report", "RUN"], "report"),
        ("matplotlib", ["demo"], "report"),
        ("tokenizers", ["train", "demo.tsa", "--data.tokens", "bpe:300"], "data"),
        ("tokenizers", ["describe", "demo.tsa", "--data.tokens", "bpe:300"], "data"),
        ("tensorboard", ["train", "demo.tsa", "--train.tensorboard"], "tensorboard"),
        ("ray", ["sweep", "demo.tsa", "--on", "ray"], "cluster"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(modules, words, extra, run, tmp_path):
    out = [] if words[0] == "describe" else ["--out", str(tmp_path / "out")]
    done = without(modules, *(str(run.path) if word == "RUN" else word for word in words), *out)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert modules in line.lower()
    assert line.endswith(f"pip install 'tokendepth[{extra}]'")
    assert not list((tmp_path / "out").rglob("checkpoints")), "it is said before anything is trained"


@pytest.mark.slow
def test_doctor_names_every_extra_that_is_missing():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"dev"}
    assert EXTRAS.keys() == extras
    done = without(",".join(itertools.chain(*EXTRAS.values())), "doctor")
    assert done.returncode == 0, "an extra is none that is needed"
    for extra in extras:
        assert f"pip install 'tokendepth[{extra}]'" in done.stdout
