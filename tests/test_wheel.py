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
    assert {"tokendepth/py.typed", "tokendepth/report/page.html"} <= set(names)
    assert {name.rsplit("/", 1)[-1] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_every_command_works(installed):
    tokendepth, folder = installed.script, installed.folder
    assert "ok   Python" in installed(tokendepth, "doctor").stdout
    assert json.loads(installed(tokendepth, "describe", "demo.tsa", *SMALL, "--model.vocab-size=50", "--json").stdout)
    installed(tokendepth, "train", "demo.budget", "--out", "runs/one", *SMALL)
    installed(tokendepth, "evaluate", "runs/one")
    installed(tokendepth, "calibrate", "runs/one", "--budget", "0.6")
    assert installed(tokendepth, "generate", "runs/one", "--budget", "0.6", "--tokens", "5").stdout
    installed(tokendepth, "report", "runs/one", "--out", "page")
    assert (folder / "page" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    cell = "demo.dense:" + ":".join(option.removeprefix("--") for option in SMALL)
    installed(tokendepth, "sweep", cell, "--seeds", "1", "--out", "swept")
    installed(tokendepth, "train", "demo.dense", "--out", "runs/plain", *SMALL)  # compiled in one form only
    installed(tokendepth, "evaluate", "runs/plain")
    rows = installed(tokendepth, "bench", "forward", "--run", "runs/plain", "--batches", "1", "--json").stdout
    assert json.loads(rows.splitlines()[0])["speedup"] > 0
    assert (folder / "runs" / "bench" / "forward.json").exists()


def test_the_demo_works(installed):
    installed("-c", SMALL_DEMO)
    assert (installed.folder / "runs" / "demo" / "report" / "report.html").exists()


def test_an_extra_that_is_missing_is_named(installed):
    installed(installed.script, "train", "demo.dense", "--out", "runs/other", *SMALL)
    hide = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
    run = "from tokendepth.cli.main import main\nmain({words!r})"
    for names, words, extra in (
        (["matplotlib", "jinja2"], ["report", "runs/other", "--out", "again"], "tokendepth[report]"),
        (["tokenizers"], ["train", "demo.tsa", "--data.tokens", "bpe:300", "--out", "runs/bpe"], "tokendepth[data]"),
    ):
        done = installed("-c", hide.format(names=names) + run.format(words=words), expect=2)
        assert extra in done.stderr
        assert done.stderr.count("\n") == 1
