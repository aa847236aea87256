"""Ctrl-C from the first moment on: a command that is still importing its modules ends without a traceback."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Loaded before anything of ours: Ctrl-C comes when the module that is named here is about to be imported.
AT_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


def script() -> str:
    """What pip writes for the command."""
    module, function = PROJECT["scripts"]["tokendepth"].split(":")
    return f"import sys; from {module} import {function}; sys.exit({function}())"


@pytest.fixture
def interrupted_at(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    (tmp_path / "sitecustomize.py").write_text(AT_AN_IMPORT)

    def run(module: str, *words: str, **options) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "INTERRUPTED_AT": module}
        command = [sys.executable, *words, "--version"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **options)

    return run


@pytest.mark.parametrize("module", ["tokendepth.cli.main", "tyro", "rich.console", "tokendepth.cli.commands.serve"])
@pytest.mark.parametrize("words", [("-m", "tokendepth"), ("-c", script())], ids=["python -m", "script"])
def test_ctrl_c_while_modules_are_imported_ends_without_a_word(module, words, interrupted_at):
    done = interrupted_at(module, *words)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_where_ctrl_c_is_ignored_it_stays_so(interrupted_at):
    """As by a shell, of what it starts in the background."""
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    done = interrupted_at("tyro", "-m", "tokendepth", **ignoring)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tokendepth ")
