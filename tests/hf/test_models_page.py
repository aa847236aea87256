"""The commands and the Python code in docs/MODELS.md work, on a smaller model."""

import re
import shlex
from pathlib import Path

import pytest

from tests.data.wheel import write_wheel
from tests.hf.models import write_llama
from tests.tiny import TEXT
from tokendepth.cli.main import main
from tokendepth.data.tasks import Item
from tokendepth.importing.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "MODELS.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The files of the download, with another model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text(TEXT * 2, encoding="utf-8")
    write_llama(tmp_path / "smollm2", max_position_embeddings=2048)
    write_wheel(tmp_path, [Item("The sun rises in the", (" east", " west"), 0)])
    return tmp_path


def test_the_commands_work_one_after_the_other(here, capsys):
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    ran = []
    for line in lines:
        words = [re.sub(r"smollm2/.*\.gguf", "smollm2", word) for word in shlex.split(line)]
        if words[0] == "tokendepth":
            main(words[1:])
            ran.append(words[1])
    assert ran == ["import", "generate", "evaluate", "report", "score"]
    assert (here / "runs" / "report" / "report.html").exists()
    assert "The three largest cities of France are" in capsys.readouterr().out


def test_the_python_works(here, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert "torch.Size([1, " in capsys.readouterr().out


def test_every_family_is_in_the_table():
    assert re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)[1:] == list(FAMILIES)
