"""The README is what a stranger trusts: its tables are made from results/, its commands and its Python work."""

import re
import shlex
from pathlib import Path

import pytest

import tokendepth as td
from benchmarks.__main__ import BENCHMARKS
from paper.__main__ import PAPER
from paper.generated import PAGES, render
from tests.tiny import TEXT
from tokendepth.cli.main import TOKENDEPTH, main, parse

ROOT = Path(__file__).parents[1]
README, USE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/USE.md"))


def shell_lines(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


LINES = shell_lines(README) + shell_lines(USE)
TINY = {
    "data.corpus": "text:text", "model.d_model": 16, "model.n_layer": 2, "model.n_head": 2, "model.d_ff": 16,
    "model.context": 24, "train.steps": 2, "train.batch_size": 2, "train.eval_every": 9,
}  # fmt: skip
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
SWEPT = ":".join(option.removeprefix("--") for option in OPTIONS)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder of one's own, with a text to train on: a whole corpus takes long."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT + "ROMEO: def depth(token):", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_those_of_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("<!-- end -->") >= 1
    assert render(text, ROOT) == text, "stale: run make readme"


def test_the_tables_are_there():
    results = (ROOT / "docs/RESULTS.md").read_text(encoding="utf-8")
    for row in (
        r"shakespeare\.dense \(n=5\)", r"shakespeare\.tsa \(n=3\)", r"shakespeare\.budget at 0\.4 \(n=5\)",
        r"enwik8\.budget \(n=3\)", r"synthetic\.sort_budget at 0\.4 \(n=3\)",
    ):  # fmt: skip
        assert re.search(rf"^\| {row} ", results, re.MULTILINE), row
    faults = (ROOT / "docs/RELIABILITY.md").read_text(encoding="utf-8")
    assert re.search(r"^\| `kill -9` at a random moment: every method, .* \| 6\d\d \|", faults, re.MULTILINE)
    for row in (
        "a random bit flipped in eval.json",
        "every catchable signal",
        "a pipe, device",
        "copies, notes",
        "a power cut",
    ):
        assert f"| {row}" in faults
    for model in (
        "span, word ends",
        "budget",
        "MoD",
        "TSA",
        "TSA, settings of its paper",
        r"budget, run at 0\.4",
        "fine-tuned with a router",
    ):
        row = rf"^\| {model} \| \d+ \| [\d.]+M \| \d+% \| \d"
        assert re.search(row, README, re.MULTILINE), f"the good, the bad, and a model that people have: {model}"


def test_the_first_screen_is_short():
    assert len(README.splitlines()) < 150


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md") if page.name != "README.md"]
    assert [page for page in pages if f"({page})" not in index] == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"\bmake (\w+)", " ".join(LINES) + " " + " ".join(re.findall(r"`make (\w+)`", README)))
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith(("make ", "pip "))])
def test_a_command_is_understood(line):
    programs = {"tokendepth ": TOKENDEPTH, "python -m paper ": PAPER, "python -m benchmarks ": BENCHMARKS}
    (start,) = [start for start in programs if line.startswith(start)]
    assert callable(parse(shlex.split(line.removeprefix(start)), programs[start]))


@pytest.mark.parametrize("page", [README, pytest.param(USE, marks=pytest.mark.slow)], ids=["README", "USE"])
def test_the_commands_work_one_after_the_other(page, here, capsys):
    """As a newcomer types them, with a smaller model; bench is a measurement, not a test."""
    ran = []
    for line in shell_lines(page):
        words = shlex.split(line)[1:]
        if not line.startswith("tokendepth ") or words[0] == "bench":
            continue
        if words[0] == "train":
            words += OPTIONS
        if words[0] == "evaluate":
            words.append("--no-timing")
        if words[0] == "sweep":
            words[words.index("--seeds") + 1] = "1"
            words = [f"{word}:{SWEPT}" if "." in word else word for word in words]
        main(words)
        ran.append(words[0])
    asked = {
        README: ["train", "evaluate", "generate", "report"],
        USE: [
            "doctor",
            "describe",
            "train",
            "train",
            "evaluate",
            "report",
            "generate",
            "train",
            "calibrate",
            "generate",
            "export",
            "sweep",
        ],
    }
    assert ran == asked[page]
    assert (here / "runs" / "report" / "report.html").exists()
    assert re.search("^(ROMEO:|def )", capsys.readouterr().out, re.MULTILINE)


def test_the_six_lines_work(here, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line and not line.startswith("import")]) <= 6
    monkeypatch.setattr(td, "recipe", lambda name, whole=td.recipe: whole(name, TINY), raising=False)
    exec(code, {})
    share, *text = capsys.readouterr().out.splitlines()
    assert 0 <= float(share) <= 1
    assert text
