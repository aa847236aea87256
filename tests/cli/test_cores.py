"""Threads that wait sleep soon: decided before PyTorch is imported, unless the user decided."""

import os
import subprocess
import sys

import pytest

from tokendepth.cli.cores import share_cores

WHEN_TORCH_COMES = """
import os, sys
from tokendepth.cli.main import main

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit(7)

sys.meta_path.insert(0, Watch())
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("decided", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=str,
)
def test_what_the_user_decided_stays(decided, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in decided.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    try:
        share_cores()
        assert os.environ.get("GOMP_SPINCOUNT") == expected
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("train", "demo.dense"), "1000"),
        (("sweep", "demo.dense"), "1000"),
        (("demo",), "1000"),
        (("retrofit", "run", "--out", "x"), "1000"),
        (("evaluate", "run"), "1000"),
        (("calibrate", "run", "--budget", "0.5"), "1000"),
        (("generate", "run"), "1000"),
        (("analyse", "run"), "1000"),
        (("score", "run", "tasks"), "1000"),
        (("bench", "training"), "None"),
        (("serve", "run"), "None"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_commands_decide_before_torch_is_imported(command, expected, tmp_path):
    """Bench times what others get, and a server should have its cores to itself."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", WHEN_TORCH_COMES, *command],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60,
    )  # fmt: skip
    assert (done.stdout.split(), done.returncode) == ([expected], 7), done.stderr
