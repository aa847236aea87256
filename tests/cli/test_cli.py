"""Every command end to end on a tiny model, and every mistake answered in one line with exit code 2."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokendepth.cli.main import main, parse
from tokendepth.config import to_dict
from tokendepth.errors import Interrupted, UserError
from tokendepth.recipes import recipe
from tokendepth.runs.files import write_json
from tokendepth.runs.run import Run

TINY = [
    *("--data.corpus", "stdlib", "--model.d-model", "32", "--model.n-layer", "3", "--model.n-head", "4"),
    *("--model.d-ff", "64", "--model.context", "32", "--train.steps", "3", "--train.batch-size", "4"),
]
EVALUATION_KEYS = {"soft", "hard", "sparse", "tlops_saved_soft", "tlops_skipped", "flops_skipped"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small file, so that evaluating it takes no time."""
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("the cat sat on the mat and the dog lay on the log. " * 60)
    return f"text:{path}"


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """A finished run of a few steps."""
    out = tmp_path_factory.mktemp("runs") / "tsa"
    main(["train", "shakespeare.tsa", *TINY, "--data.corpus", corpus, "--out", str(out)])
    return out


def refused(capsys, *arguments: str) -> str:
    """The one line that a mistake is answered with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("tokendepth: ")
    return lines[0]


# --- the commands -----------------------------------------------------------------------------------------------------


def test_train_wrote_a_finished_run(run):
    assert Run.open(run).finished
    assert Run.open(run).config.recipe == "shakespeare.tsa"
    assert Run.open(run).config.train.steps == 3


def test_resuming_a_finished_run_changes_nothing(run, corpus):
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    main(["train", "shakespeare.tsa", *TINY, "--data.corpus", corpus, "--out", str(run), "--resume"])
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_evaluate_prints_one_json_object(run, capsys):
    main(["evaluate", str(run), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= EVALUATION_KEYS
    for execution in ("soft", "hard", "sparse"):
        assert {"loss", "active_fraction"} <= result[execution].keys()
    assert Run.open(run).evaluation == result


def test_evaluate_prints_a_table_and_the_flips(run, capsys):
    main(["evaluate", str(run), "--no-timing"])
    printed = capsys.readouterr().out
    assert "decisions that differ between hard and sparse: 0" in printed
    assert re.search(r"hard: val loss \d[.]\d{4} \(\d[.]\d{4} bits per byte\), active fraction \d[.]\d{3}\n", printed)


def test_the_test_split_is_not_kept_as_the_evaluation(run, capsys):
    main(["evaluate", str(run), "--json", "--no-timing"])
    before = Run.open(run).evaluation
    main(["evaluate", str(run), "--split", "test", "--json", "--no-timing"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["split"] == "test"
    assert Run.open(run).evaluation == before


def test_report_names_its_page(run, tmp_path, capsys):
    main(["evaluate", str(run), "--json", "--no-timing"])
    capsys.readouterr()
    main(["report", str(run), "--out", str(tmp_path / "report"), "--results", str(tmp_path / "rows.json")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "report" / "report.html")
    assert (tmp_path / "report" / "report.html").exists()
    assert json.loads((tmp_path / "rows.json").read_text())[0]["config"]["recipe"] == "shakespeare.tsa"


def test_generate_continues_the_prompt_and_says_what_it_cost(run, capsys):
    arguments = ["generate", str(run), "--prompt", "the ", "--tokens", "40"]
    main(arguments)
    first = capsys.readouterr()
    assert first.out.startswith("the ")
    assert len(first.out.rstrip("\n")) == 44, "a sample longer than the context of 32"
    assert "40 tokens" in first.err
    assert "active fraction" in first.err
    main(arguments)
    assert capsys.readouterr().out == first.out, "the same seed gives the same text"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("shakespeare.dense", 4_782_336),
        ("shakespeare.tsa", 4_864_901),
        ("enwik8.dense", 6_350_848),
        ("enwik8.tsa", 6_433_413),
        ("synthetic.copy_dense", 1_199_104),
        ("synthetic.copy_tsa", 1_219_909),
    ],
)
def test_describe_counts_to_the_digit_without_any_corpus(name, parameters, capsys, monkeypatch):
    monkeypatch.setattr("tokendepth.data.corpora.fetch", None)
    main(["describe", name, "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == parameters
    assert facts["flops_per_token"] >= facts["flops_per_token_without_routers"] > 2 * 12 * 6 * 128 * 128
    assert facts["memory"]["weights_bytes"] == 4 * parameters


def test_describe_follows_overrides(capsys):
    main(["describe", "shakespeare.tsa", "--model.n-layer", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["router_parameters"] == 0


def test_describe_takes_a_run_too(capsys, tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "format-2" / "finished"
    main(["describe", str(golden), "--json"])
    weights = Run.open(golden).weights()
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(array.size for array in weights.values())
    with pytest.raises(SystemExit):
        main(["describe", str(tmp_path / "none")])
    assert capsys.readouterr().err.startswith(f"tokendepth: {tmp_path / 'none'}")


def test_doctor_finds_this_installation_healthy(capsys):
    main(["doctor"])
    assert "FAIL" not in capsys.readouterr().out


def test_an_option_may_be_given_several_times(run, capsys):
    assert parse(["generate", "x", "--stop", "a", "--stop=b c"]).stop == ("a", "b c")
    assert parse(["generate", "x"]).stop == ()
    main(["generate", str(run), "--prompt", "the cat", "--tokens", "30", "--stop", "a", "--stop", " "])
    assert not {"a", " "} & set(capsys.readouterr().out.removeprefix("the cat").strip())


def test_score_prints_a_table_or_one_json_object(run, tmp_path, capsys):
    (tmp_path / "animals.jsonl").write_text('{"context": "the cat", "choices": [" sat", " a"], "answer": 0}\n')
    main(["score", str(run), str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["execution"] == "sparse"
    assert found["tasks"]["animals"]["items"] == 1
    main(["score", str(run), str(tmp_path), "--only", "animals", "--items", "1", "--execution", "hard"])
    shown = capsys.readouterr().out
    assert re.search(r"animals\s.* 1\s.* (100|0)\.0% ±", shown), shown
    assert "± standard error" in shown


def test_an_interrupted_demo_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise Interrupted(signal.SIGINT, 3, tmp_path)

    monkeypatch.setattr("tokendepth.training.loop.train", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--out", str(tmp_path)])
    assert stop.value.code == 130
    assert capsys.readouterr().err.endswith(f"every run in {tmp_path} is saved; repeat the command to continue\n")


@pytest.mark.slow
def test_demo_trains_evaluates_and_reports_and_does_not_repeat_itself(tmp_path, capsys, monkeypatch):
    from tokendepth.config import override

    tiny = {
        "train.steps": "2",
        "train.batch_size": "2",
        "model.n_layer": "2",
        "model.d_model": "16",
        "model.d_ff": "16",
    }
    tiny["data.corpus"] = f"text:{tmp_path / 'corpus.txt'}"
    (tmp_path / "corpus.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    monkeypatch.setattr("tokendepth.cli.commands.one.recipe", lambda name: override(recipe(name), tiny))
    main(["demo", "--out", str(tmp_path / "demo")])
    output = capsys.readouterr()
    said = output.out
    page = tmp_path / "demo" / "report" / "report.html"
    assert str(page.resolve()) in said
    assert "soft" in said
    names = ("demo.dense", "demo.budget", "demo.span", "demo.tsa")
    words = "demo.dense, demo.budget, demo.span and demo.tsa were trained on corpus.txt for 2 steps each"
    assert words in " ".join(said.split())
    assert all((tmp_path / "demo" / name / "eval.json").exists() for name in names)
    assert "<svg" in page.read_text()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").glob("demo.*/*")}
    main(["demo", "--out", str(tmp_path / "demo")])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").glob("demo.*/*")} == stamps


def test_an_evaluation_is_printed_even_where_it_cannot_be_kept(run, capsys, monkeypatch):
    def full(*_):
        raise UserError("no space is left")

    monkeypatch.setattr(Run, "write_evaluation", full)
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--json", "--no-timing"])
    assert json.loads(capsys.readouterr().out).keys() >= EVALUATION_KEYS


def test_bytes_of_one_character_are_printed_together(tmp_path, capsys):
    (tmp_path / "text").write_text("né à côté " * 100)
    tiny = [*TINY, "--data.corpus", f"text:{tmp_path / 'text'}", "--data.tokens", "byte", "--train.steps", "60"]
    main(["train", "demo.dense", *tiny, "--train.lr", "0.01", "--out", str(tmp_path / "run")])
    capsys.readouterr()
    main(["generate", str(tmp_path / "run"), "--prompt", "né à ", "--temperature", "0", "--tokens", "40"])
    assert capsys.readouterr().out.count("é") > 2, "two bytes, one character"


@pytest.mark.parametrize("prompt", [["--prompt", "-the"], ["--prompt=-the"], ["--prompt=--the"]])
def test_a_prompt_may_begin_with_a_dash(prompt):
    command = parse(["generate", "x", *prompt])
    assert command.prompt == prompt[-1].removeprefix("--prompt=")


def test_options_may_stand_before_the_recipe_and_the_last_of_two_counts():
    line = "train --train.steps 5 --method.dial --resume demo.budget --train.steps=6 --method.no-dial"
    command = parse(line.split())
    assert command.resume
    assert command.recipe.train.steps == 6
    assert not command.recipe.method.dial


def test_what_stdout_cannot_encode_is_escaped(tmp_path):
    (tmp_path / "text").write_text("é" * 400)
    main(["train", "demo.dense", *TINY, "--data.corpus", f"text:{tmp_path / 'text'}", "--out", str(tmp_path / "run")])
    command = [sys.executable, "-m", "tokendepth", "generate", tmp_path / "run", "--tokens", "3"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == r"\xe9\xe9\xe9"


def test_describing_a_model_takes_none_of_its_memory(capsys):
    main(["describe", "demo.tsa", "--model.d-model", "1000000", "--model.n-head", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["parameters"] > 10**13


@pytest.mark.slow
def test_bash_completes_commands_recipes_and_options(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--tyro-print-completion", "bash"])
    assert not stop.value.code
    (tmp_path / "completion").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        line = f"source {tmp_path / 'completion'}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        call = "$(complete -p tokendepth | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(["bash", "-c", line + call], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert completed("tokendepth", "tra") == ["train"]
    assert completed("tokendepth", "train", "shakespeare.t") == ["shakespeare.tsa"]
    assert completed("tokendepth", "train", "shakespeare.tsa", "--train.st") == ["--train.steps"]


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("tokendepth 0.")


def test_help_loads_no_torch():
    code = """
import sys
from tokendepth.cli.main import main
try:
    main(["train", "--help"])
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "shakespeare.tsa" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m tokendepth describe demo.tsa | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


# --- mistakes ---------------------------------------------------------------------------------------------------------

TRAIN = ["train", "shakespeare.tsa"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], ["'trian'", "'train'"]),
        (["train"], ["recipe", "shakespeare.tsa"]),
        (["train", "shakespeare.tza"], ["'shakespeare.tza'", "'shakespeare.tsa'"]),
        (["train", "shakespeare.tsa", "enwik8.tsa"], ["'enwik8.tsa'", "one recipe", "--out"]),
        ([*TRAIN, "--train.stepz", "3"], ["--train.stepz", "'--train.steps'"]),
        ([*TRAIN, "--train.steps"], ["--train.steps", "value"]),
        ([*TRAIN, "--train.steps", "ten"], ["'ten'", "whole number"]),
        ([*TRAIN, "--train.steps", "0"], ["0", "from 1"]),
        ([*TRAIN, "--train.lr", "nan"], ["train.lr", "nan"]),
        ([*TRAIN, "--train.device", "gpu"], ["'gpu'", "cuda"]),
        (["train", "shakespeare.dense", "--method.depth-penalty", "1"], ["--method.depth-penalty", "tsa", "dense"]),
        (["train", "shakespeare.dense", "--method.colour", "1"], ["--method.colour", "dense has no options"]),
        ([*TRAIN, "--method.depth-penalty", "-1"], ["method.depth_penalty", "-1"]),
        ([*TRAIN, "--method.threshold", "1.5"], ["method.threshold", "1.5", "0 to 1"]),
        ([*TRAIN, "--model.dropout", "1"], ["model.dropout", "1.0", "exclusive"]),
        ([*TRAIN, "--model.d-model", "100"], ["model.d_model", "100", "model.n_head (8)"]),
        ([*TRAIN, "--train.batch-size", "5", "--train.accumulate", "2"], ["train.batch_size", "5", "(2)"]),
        ([*TRAIN, "--data.corpus", "shakespear"], ["'shakespear'", "'shakespeare'"]),
        ([*TRAIN, "--data.corpus", "text:"], ["text:PATH"]),
        ([*TRAIN, "--data.corpus", "text:/no/such/file"], ["/no/such/file", "no such file"]),
        ([*TRAIN, "--data.source-length", "5"], ["data.source_length", "copy and sort"]),
        (["train", "synthetic.copy_tsa", "--model.context", "10"], ["model.context", "10", "at least 42"]),
        ([*TRAIN, "--resum"], ["--resum", "'--resume'"]),
        ([*TRAIN, "--ouut", "x"], ["--ouut", "'--out'"]),
        ([*TRAIN, "--steps", "5"], ["--steps", "'--train.steps'"]),
        ([*TRAIN, "-steps", "5"], ["-steps", "'--train.steps'"]),
        ([*TRAIN, "--stps", "5"], ["--stps", "'--train.steps'"]),
        ([*TRAIN, "--train_steps", "5"], ["--train-steps", "'--train.steps'"]),
        ([*TRAIN, "--train-steps", "5"], ["--train-steps", "'--train.steps'"]),
        ([*TRAIN, "--model.steps", "5"], ["--model.steps", "'--train.steps'"]),
        ([*TRAIN, "--lr", "1"], ["--lr", "'--train.lr'"]),
        ([*TRAIN, "--corpus", "x"], ["--corpus", "'--data.corpus'"]),
        ([*TRAIN, "--depth-penalty", "1"], ["--depth-penalty", "'--method.depth-penalty'"]),
        (["train", "shakespeare.dense", "--depth-penalty", "1"], ["--depth-penalty", "tsa", "dense"]),
        ([*TRAIN, "--method", "mod"], ["--method", "recipe", "shakespeare.mod", "early_exit"]),
        ([*TRAIN, "--wandb", "x"], ["--wandb", "--train.tensorboard", "--resume"]),
        ([*TRAIN, "--train.tensorboard", "True"], ["'True'", "--train.tensorboard or --train.no-tensorboard"]),
        ([*TRAIN, "--train.tensorboard=yes"], ["'yes'", "--train.tensorboard or --train.no-tensorboard"]),
        ([*TRAIN, "--no-resume=1"], ["'1'", "--resume or --no-resume"]),
        ([*TRAIN, "--out", ""], ["--out", "empty"]),
        ([*TRAIN, "--out", "a" * 300], ["--out", "aaa", "too long"]),
        ([*TRAIN, "--train.seed", "-1"], ["train.seed", "-1", "from 0 to 2147483647"]),
        ([*TRAIN, "--model.n-layer", "100000"], ["model.n_layer", "100000", "from 1 to 1000"]),
        (["trian", "--help"], ["'trian'", "'train'"]),
        (["train", "shakespear.tsa", "--help"], ["'shakespear.tsa'", "'shakespeare.tsa'"]),
        (["evaluate", ""], ["empty"]),
        (["evaluate", "-x"], ["-x", "unknown option of evaluate"]),
        (["evaluate", "a" * 300], ["aaa", "too long"]),
        (["evaluate", "x", "--timing", "False"], ["'False'", "--timing or --no-timing"]),
        (["calibrate", "x"], ["--budget", "value"]),
        (["generate", "x", "--prompt", "--the"], ["--prompt needs a value", "--prompt=--"]),
        (["report", "-x"], ["-x", "unknown option of report"]),
        (["report", "x", "--results", "a" * 300], ["--results", "too long"]),
        (["sweep"], ["no recipes", "shakespeare.tsa"]),
        (["sweep", "demo.tsa:steps=3"], ["--steps", "'--train.steps'"]),
        (["--tyro-print-completion", "csh"], ["'csh'", "bash, zsh"]),
        (["evaluate"], ["one run folder"]),
        (["evaluate", "/no/such/run"], ["/no/such/run", "no such run"]),
        (["evaluate", "x", "--split", "train"], ["'train'", "val, test"]),
        (["evaluate", "x", "--jsn"], ["--jsn", "'--json'"]),
        (["generate", "x", "--tokens", "many"], ["'many'", "whole number"]),
        (["score", "x"], ["'x'", "expected RUN TASKS"]),
        (["report"], ["no runs"]),
        (["report", "x", "--results", "tests"], ["tests is a folder", "name one: tests/results.json"]),
        (["sweep", "demo.tsa", "--results", "tests"], ["tests is a folder", "name one: tests/results.json"]),
        (["sweep", "demo.tsa", "--results", "README.md/rows.json"], ["README.md"]),
        (["sweep", "demo.tsa", "--data.corpus", "text:a"], ["unknown option of sweep", "demo.tsa:data.corpus=text:a"]),
        (["bench", "sleep"], ["sleep", "forward", "training"]),
        (["doctor", "who"], ["who", "options only"]),
    ],
    ids=lambda value: " ".join(value)[:60] if value and value[0] in ("train", "evaluate") else None,
)
def test_a_mistake_is_named_with_its_remedy(arguments, named, capsys):
    line = refused(capsys, *arguments)
    for word in named:
        assert word in line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["none"], ["none: no such folder or file", "pip download"]),
        ([".", "--only", "animal"], ["'animal': no such task in .", "'animals'"]),
        ([".", "--items", "0"], ["--items is 0", "1 or more"]),
        ([".", "--budget", "0.5"], ["has no budget to set"]),
        (["."], ["the character 'Z'"]),
    ],
)
def test_tasks_that_cannot_be_scored(options, named, run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "animals.jsonl").write_text('{"context": "the cat", "choices": [" Z", " a"], "answer": 0}\n')
    line = refused(capsys, "score", str(run), *options)
    for word in named:
        assert word in line


def test_cuda_without_cuda(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = refused(capsys, *TRAIN, "--train.device", "cuda", "--out", str(tmp_path / "run"))
    assert "cuda" in line
    assert "set --train.device cpu or auto" in line
    assert not (tmp_path / "run").exists()
    assert "set --device cpu or auto" in refused(capsys, "bench", "forward", "--device", "cuda")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", ["empty"]),
        (b"too short", ["too short", "9 tokens"]),
        (b"a" * 40 + b"\xff" * 400, ["not UTF-8", "byte 40", "--data.tokens byte"]),
        (b"abc " * 100, ["model.context", "128", "longer than the corpus"]),
    ],
)
def test_a_bad_text_file(content, named, capsys, tmp_path):
    (tmp_path / "text").write_bytes(content)
    line = refused(capsys, *TRAIN, "--data.corpus", f"text:{tmp_path / 'text'}", "--out", str(tmp_path / "run"))
    for word in named:
        assert word in line
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_folder_as_text(capsys, tmp_path):
    assert "folder" in refused(capsys, *TRAIN, "--data.corpus", f"text:{tmp_path}")


def test_no_network_and_no_local_copy(capsys, tmp_path, monkeypatch):
    from urllib.error import URLError

    def unreachable(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    line = refused(capsys, *TRAIN, "--out", str(tmp_path / "run"))
    assert "TOKENDEPTH_DATA" in line
    assert "tinyshakespeare.txt" in line


def test_a_wrong_checksum(capsys, tmp_path, monkeypatch):
    (tmp_path / "tinyshakespeare.txt").write_text("not Shakespeare at all " * 100)
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("TOKENDEPTH_DATA", str(tmp_path))
    line = refused(capsys, *TRAIN, "--out", str(tmp_path / "run"))
    assert "tinyshakespeare.txt" in line
    assert "SHA-256" in line


def test_a_data_folder_without_the_corpus_is_named(capsys, tmp_path, monkeypatch):
    from urllib.error import URLError

    def unreachable(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("TOKENDEPTH_DATA", str(tmp_path / "nodir"))
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    line = refused(capsys, *TRAIN, "--out", str(tmp_path / "run"))
    assert f"{tmp_path / 'nodir'}, which has no tinyshakespeare.txt" in line


def test_a_model_that_no_memory_holds(capsys, tmp_path, corpus):
    huge = ["--model.d-model", "1000000", "--model.n-head", "1"]
    line = refused(capsys, *TRAIN, *TINY, "--data.corpus", corpus, *huge, "--out", str(tmp_path / "run"))
    assert "parameters needs" in line
    assert "lower --model.d-model" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.45 TiB for an array"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation"),
    ],
)
def test_an_allocation_that_fails(error, capsys, monkeypatch):
    def exhausted(*_, **__):
        raise error

    monkeypatch.setattr("tokendepth.training.loop.train", exhausted)
    line = refused(capsys, *TRAIN)
    assert "not enough memory" in line
    assert str(error)[:30] in line
    assert "batch" in line


def test_another_runtime_error_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("tokendepth.training.loop.train", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(TRAIN)


@pytest.mark.parametrize("command", [["train", "demo.tsa"], ["describe", "demo.tsa"], ["doctor"]])
def test_a_package_that_is_not_installed(command):
    code = """
import sys

class NoTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, NoTorch())
from tokendepth.cli.main import main
main(sys.argv[1:])
"""
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert "torch" in line
    assert "install tokendepth again" in line


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999999"])
def test_a_seed_out_of_range(seed, run, capsys):
    line = refused(capsys, "generate", str(run), "--seed", seed)
    assert f"seed is {seed}; expected a number from 0 to 2147483647; set it with --seed" in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}", "is damaged"),
        ("[]", "is damaged"),
        ("null", "is damaged"),
        ("{", "is damaged"),
        ('{"version": 2}', "is damaged"),
        ('{"version": 3}', "is damaged"),
        ('{"version": 1, "method": "tsa", "hard": 3}', "is damaged: its hard is 3; expected an object"),
        ('{"version": 1, "method": "tsa"}', "is damaged: its hard is missing"),
    ],
)
def test_an_evaluation_that_is_none(content, problem, capsys, tmp_path):
    Run.create(tmp_path / "run", recipe("demo.tsa"), resume=False)
    (tmp_path / "run" / "eval.json").write_text(content)
    line = refused(capsys, "report", str(tmp_path / "run"), "--out", str(tmp_path / "report"))
    assert f"eval.json {problem}" in line
    assert f"tokendepth evaluate {tmp_path / 'run'}" in line


def test_an_output_folder_that_holds_something_else(run, capsys, tmp_path, corpus):
    same = ["train", "shakespeare.tsa", *TINY, "--data.corpus", corpus, "--out", str(run)]
    assert "--resume" in refused(capsys, *same)
    line = refused(capsys, *same, "--train.seed", "1", "--resume")
    assert "train.seed is 0, not 1" in line
    (tmp_path / "notes.txt").write_text("mine")
    line = refused(capsys, *same[:-1], str(tmp_path))
    assert "notes.txt" in line
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_output_folder_that_cannot_be_written(capsys, tmp_path, corpus):
    (tmp_path / "file").write_text("in the way")
    line = refused(capsys, *TRAIN, *TINY, "--data.corpus", corpus, "--out", str(tmp_path / "file" / "run"))
    assert "cannot write" in line
    assert "not a folder; choose another" in line


def test_a_prompt_with_a_character_that_was_never_seen(run, capsys):
    line = refused(capsys, "generate", str(run), "--prompt", "the ☃")
    assert "'☃'" in line
    assert "position 4" in line


def test_an_unfinished_run_is_not_evaluated(capsys, tmp_path):
    Run.create(tmp_path / "run", recipe("demo.tsa"), resume=False)
    assert "not finished" in refused(capsys, "evaluate", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tree: tree.update(version=99), ["version is 99", "upgrade"]),
        (lambda tree: tree["method"].update(name="magic"), ["'magic'", "no such method"]),
        (lambda tree: tree["train"].update(stepz=1), ["train.stepz", "'steps'"]),
        (lambda tree: tree["train"].update(steps="many"), ["'many'", "whole number"]),
    ],
)
def test_a_config_that_was_edited_wrongly(change, named, capsys, tmp_path):
    tree = to_dict(recipe("demo.tsa"))
    change(tree)
    write_json(tmp_path / "config.json", tree)
    line = refused(capsys, "evaluate", str(tmp_path))
    for word in [*named, "config.json"]:
        assert word in line


def test_a_damaged_model_is_not_evaluated(run, capsys, tmp_path):
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    line = refused(capsys, "evaluate", str(tmp_path))
    assert "model.safetensors is damaged" in line


def test_memory_that_runs_out_without_a_word_is_one_line(monkeypatch, capsys):
    def full():
        raise MemoryError

    monkeypatch.setattr("tokendepth.cli.main.parse", lambda *arguments: full)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 2
    assert "not enough memory (MemoryError)" in capsys.readouterr().err
