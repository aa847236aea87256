"""What an installed wheel can do away from the checkout: everything but the paper and the benchmarks."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tiny import TEXT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]
ROOT = Path(__file__).parents[1]
SMALL = [
    *("--data.corpus=text:text", "--model.d-model=16", "--model.n-layer=2", "--model.n-head=2", "--model.d-ff=16"),
    *("--model.context=16", "--train.steps=2", "--train.batch-size=2", "--train.device=cpu"),
]
# Importing torch takes seconds, so one process does it for several commands. What each printed ends in a zero.
COMMANDS = """
import json, sys
from tokendepth.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code == int(sys.argv[2]), words
    print(end=chr(0))
"""
SMALL_DEMO = """
import sys
from dataclasses import replace
from tokendepth.recipes import demo
whole = demo._run
def small(method):
    config = whole(method)
    return replace(
        config, data=replace(config.data, corpus="text:text"), train=replace(config.train, steps=2, batch_size=2),
        model=replace(config.model, d_model=16, n_head=2, d_ff=16, context=16),
    )
demo._run = small
from tokendepth.cli.main import main
main(["demo"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "tokendepth", source / "tokendepth", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    command = ["pip", "wheel", source, "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", out]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs a command of the installed wheel, in a folder with a text, far from the checkout."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("away")
    command = ["pip", "install", "--no-deps", "--no-index", "--quiet", "--target", site, wheel]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True)
    (folder / "text").write_text(TEXT * 3, encoding="utf-8")

    def run(*words: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site), **environment}
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    code = "import sys, tokendepth; print(tokendepth.__file__)"
    assert run("-c", code).stdout.startswith(str(site)), "another tokendepth stands before the installed one"
    run.folder = folder  # pyright: ignore[reportFunctionMemberAccess]
    run.script = str(site / "bin" / "tokendepth")  # pyright: ignore[reportFunctionMemberAccess]
    return run


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"tokendepth", wheel.name.split("-py3")[0] + ".dist-info"}
    assert {"tokendepth/py.typed", "tokendepth/report/page.html", "tokendepth/explore/LICENSES.txt"} <= set(names)
    page = {f"tokendepth/explore/page/{path.name}" for path in (ROOT / "tokendepth/explore/page").iterdir()}
    assert page <= set(names)
    assert len(page) > 5
    assert {name.rsplit("/", 1)[-1] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_every_command_works(installed):
    assert "ok   Python" in installed(installed.script, "doctor").stdout
    cell = "demo.dense:" + ":".join(option.removeprefix("--") for option in SMALL)
    commands = [
        ["describe", "demo.tsa", *SMALL, "--model.vocab-size=50", "--json"],
        ["train", "demo.budget", "--out", "runs/one", *SMALL],
        ["evaluate", "runs/one"],
        ["calibrate", "runs/one", "--budget", "0.6"],
        ["generate", "runs/one", "--budget", "0.6", "--tokens", "5"],
        ["report", "runs/one", "--out", "page"],
        ["sweep", cell, "--seeds", "1", "--out", "swept"],
        ["train", "demo.dense", "--out", "runs/plain", *SMALL],
        ["evaluate", "runs/plain"],
        ["bench", "forward", "--run", "runs/plain", "--batches", "1", "--json"],
    ]
    # What PyTorch makes of compiled code does not depend on where this package lies.
    done = installed("-c", COMMANDS, json.dumps(commands), "0", TORCH_COMPILE_DISABLE="1")
    printed = {words[0]: said for words, said in zip(commands, done.stdout.split("\0"), strict=False)}
    assert json.loads(printed["describe"])
    assert printed["generate"]
    assert json.loads(printed["bench"].splitlines()[0])["speedup"] > 0
    assert (installed.folder / "page" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (installed.folder / "runs" / "bench" / "forward.json").exists()


def test_the_demo_works(installed):
    installed("-c", SMALL_DEMO)
    assert (installed.folder / "runs" / "demo" / "report" / "report.html").exists()


def test_an_extra_that_is_missing_is_named(installed):
    hide = "import sys\nfor name in ('matplotlib', 'jinja2', 'tokenizers'): sys.modules[name] = None\n"
    run = str(ROOT / "tests" / "golden" / "format-2" / "finished")
    report, bpe = ["report", run, "--out", "again"], ["train", "demo.tsa", "--data.tokens", "bpe:300", "--out", "bpe"]
    said = installed("-c", hide + COMMANDS, json.dumps([report, bpe]), "2").stderr.splitlines()
    first, second = (line for line in said if not line.startswith("loading PyTorch"))  # shown if loading takes seconds
    assert "tokendepth[report]" in first
    assert "tokendepth[data]" in second
