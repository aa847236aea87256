"""The scripts in examples/, run in miniature as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_corpus

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_retrofit(tmp_path):
    line = ["examples/retrofit.py", "--out", str(tmp_path), "--corpus", write_corpus(tmp_path / "text"), "--steps", "4"]
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [" ".join(words.split()[:3]) for words in done.stdout.splitlines()] == [
        "untouched loss " + done.stdout.split()[2],
        "at the budget",
        "at full budget",
    ]
    assert "of the block FLOPs" in done.stdout


def test_every_example_is_run():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f'{path.name}"' not in tests] == []
