"""The README is what a stranger trusts: its tables are made from results/, and its commands work."""

import re
import shlex
from pathlib import Path

import pytest

from paper.readme import render
from tests.tiny import TEXT
from tokendepth.cli.main import main, parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
COMMANDS = [line for line in LINES if line.startswith("tokendepth ")]
TINY = (
    "--data.corpus stdlib --model.d-model 16 --model.n-layer 2 --model.n-head 2 --model.d-ff 16 --model.context 16 "
    "--train.steps 2 --train.batch-size 2 --train.eval-every 9"
)
SWEPT = ":".join(f"{name}={value}" for name, value in zip(*[iter(TINY.replace("--", "").split())] * 2, strict=True))


def test_the_tables_are_those_of_results():
    assert render(README, ROOT) == README, "stale: run make readme"


def test_the_tables_are_there():
    assert README.count("<!-- end -->") == 7
    assert re.search(r"\| shakespeare\.dense \(n=5\) ", README)
    assert re.search(r"\| shakespeare\.tsa \(n=3\) ", README)
    assert re.search(r"\| shakespeare\.budget at 0\.4 \(n=5\) ", README)
    assert re.search(r"\| enwik8\.budget \(n=3\) ", README)
    assert re.search(r"\| synthetic\.sort_budget at 0\.4 \(n=3\) ", README)
    assert re.search(r"\| `kill -9` at a random moment, a save at every step \| 5\d\d \|", README)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake (\w+)", " ".join(LINES) + " " + " ".join(re.findall(r"`make (\w+)`", README)))
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command):
    assert callable(parse(shlex.split(command)[1:]))


def test_the_commands_work_one_after_the_other(tmp_path, monkeypatch, capsys):
    """As a newcomer types them, with a smaller model; bench is a measurement, not a test."""
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] in ("bench",):
            continue
        if words[0] == "train":
            words = [*words[:2], *words[2:], *shlex.split(TINY)]
        if words[0] == "evaluate":
            words.append("--no-timing")
        if words[0] == "sweep":
            (tmp_path / "text").write_text(TEXT, encoding="utf-8")  # the library's whole validation split takes long
            words[words.index("--seeds") + 1] = "1"
            swept = SWEPT.replace("=stdlib", "=text:text")
            words = [f"{word}:{swept}" if "." in word else word for word in words]
        main(words)
        ran.append(words[0])
    asked = ["doctor", "describe", "train", "train", "evaluate", "report", "generate"]
    assert ran == [*asked, "train", "calibrate", "generate", "sweep"]
    assert (tmp_path / "runs" / "report" / "report.html").exists()
    assert "ROMEO:" in capsys.readouterr().out
