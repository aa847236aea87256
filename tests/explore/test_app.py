"""Over HTTP: the page's files, its requests, and one-line errors."""

import json
import re
import shutil
import socket
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.explore.conftest import Page, exploring
from tests.tiny import one_line
from tokendepth.cli.main import parse
from tokendepth.errors import UserError
from tokendepth.explore.app import FILES, HEADERS, LONGEST_BODY, PAGE
from tokendepth.explore.server import explore
from tokendepth.measure.evaluate import evaluate
from tokendepth.report.palette import ACTIVE, SKIPPED
from tokendepth.runs.run import Run

pytestmark = pytest.mark.xdist_group("explore")
ROOT = Path(__file__).resolve().parents[2]
VENDORED = {  # third-party files, unmodified: htm 3.1.1 (preact/standalone.module.js), uPlot 1.6.32
    "preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@pytest.fixture(scope="module")
def page(run_of):
    with exploring(run_of("budget"), run_of("dense")) as found:
        yield found


def answer(page: Page, path: str, body: object = None, headers: dict[str, str] | None = None):
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = Request(page.url + path, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urlopen(request, timeout=30) as found:
            return found.status, found.headers, found.read()
    except HTTPError as refused:
        return refused.code, refused.headers, refused.read()


def complaint(page: Page, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    status, _, content = answer(page, path, body, headers)
    return status, json.loads(content)["error"]["message"]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_the_browser_keeps_it_here(page):
    for name in ("", *FILES):
        status, headers, content = answer(page, f"/{name}")
        assert status == 200
        assert content == (PAGE / (name or "index.html")).read_bytes()
        assert headers["content-type"] == FILES[name or "index.html"]
        assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert sorted(FILES) == sorted(path.name for path in PAGE.iterdir()), "every file can be asked for, and no other"


@pytest.mark.parametrize("path", ["/none.js", "/..%2fapp.py", "/%2e%2e/app.py", "/runs/9/about", "/config.json"])
def test_nothing_else_can_be_read(page, path):
    status, words = complaint(page, path)
    assert status == 404
    assert words.startswith("no such address")


def test_nothing_comes_from_elsewhere():
    """None of our scripts and styles names another host; the only URL is the SVG namespace."""
    for path in PAGE.iterdir():
        if path.name in VENDORED:  # the browser enforces it for these: see the policy above and test_page.py
            continue
        found = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[\w/]*""", path.read_text(encoding="utf-8")))
        assert {each for each in found if "www.w3.org" not in each} == set(), path.name


def test_files_of_others_are_as_published_and_named_in_the_notice():
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for name, digest in VENDORED.items():
        assert sha256((PAGE / name).read_bytes()).hexdigest() == digest
        assert name in notice


def test_the_colours_are_the_reports():
    style, saving = ((PAGE / name).read_text(encoding="utf-8") for name in ("explore.css", "saving.js"))
    red, green, blue = (int(ACTIVE[n : n + 2], 16) for n in (1, 3, 5))
    assert f"--active: {red} {green} {blue};" in style
    assert f"--skipped: {SKIPPED};" in style
    assert f'"{ACTIVE}", "{SKIPPED}"' in saving


# --- the page's requests ----------------------------------------------------------------------------------------------


def test_runs_and_texts(page):
    page.wait_for_budgets()
    _, _, content = answer(page, "/runs")
    budget, dense = json.loads(content)
    assert (budget["name"], budget["routed"], dense["routed"], dense["dial"]) == ("bottles-budget", True, False, None)
    assert budget["executions"] == ["hard", "sparse"]
    for point in (None, budget["dial"]["points"][0], 1.0):
        status, _, content = answer(page, "/runs/0/look", {"text": "green", "execution": "sparse", "point": point})
        assert status == 200
        told = {"text": "green", "execution": "sparse", "point": point}
        expected = page.explored[0].look(*told.values())
        assert json.loads(content) | {"seconds": 0} == expected | {"seconds": 0}


def test_it_writes_as_the_server_does(page):
    asked = {"model": "bottles-dense", "prompt": [1, 2], "max_tokens": 3, "temperature": 0, "depth": True}
    status, _, content = answer(page, "/runs/1/v1/completions", asked)
    assert status == 200
    assert len(json.loads(content)["choices"][0]["depth"]["tokens"]) == 3


def test_curves_and_tables_are_read_anew(run_of, tmp_path):
    run = Run.open(shutil.copytree(run_of("tsa").path, tmp_path / "copied"))
    with exploring(run) as page:
        before = json.loads(answer(page, "/runs/0/about")[2])
        assert before["cells"] == []
        assert "not evaluated yet" in before["sentence"]
        assert [figure["title"] for figure in before["figures"]] == ["loss", "active fraction"]
        assert before["figures"][0]["lines"][0]["points"] == [
            [row["step"], row["task_loss"]] for row in run.metrics() if "task_loss" in row
        ]
        run.write_evaluation(evaluate(run, device="cpu", timing=False))
        after = json.loads(answer(page, "/runs/0/about")[2])
        assert {cell["group"] for cell in after["cells"]} == {"", "soft", "executed"}
        shutil.rmtree(run.path)
        status, words = complaint(page, "/runs/0/about")
        assert status == 404
        assert str(run.path) in words
        assert answer(page, "/runs/0/look", {"text": "green", "execution": "soft", "point": None})[0] == 200


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "the body is invalid"),
        (b"[" * 2000, 400, "the body is invalid"),
        ([], 400, "the body is invalid"),
        ({"text": "a", "execution": "sparse"}, 400, "the body is invalid"),
        ({"text": 5, "execution": "sparse", "point": None}, 400, "text is invalid"),
        ({"text": "a", "execution": "soft", "point": None}, 400, "expected one of hard, sparse"),
        ({"text": "a", "execution": ["x"], "point": None}, 400, "expected one of hard, sparse"),
        ({"text": "a", "execution": "sparse", "point": 0.123}, 400, "expected null or one of 0.2, "),
        ({"text": "a", "execution": "sparse", "point": [1]}, 400, "expected null or one of 0.2, "),
        ({"text": "", "execution": "sparse", "point": None}, 400, "the text is empty"),
        ({"text": "\u2603", "execution": "sparse", "point": None}, 400, "'\u2603'"),
        ({"text": "\ud800", "execution": "sparse", "point": None}, 400, "is not among the corpus's"),
        ({"text": "a" * 20000, "execution": "sparse", "point": None}, 400, "the text has 20,000 tokens"),
        (b" " * (LONGEST_BODY + 1), 413, "larger than"),
    ],
)
def test_a_text_that_cannot_be_looked_at(page, body, status, words):
    page.wait_for_budgets()
    found, said = complaint(page, "/runs/0/look", body)
    assert (found, words in said) == (status, True), said
    assert "\n" not in said


def test_pages_of_the_web_get_nothing(page):
    assert complaint(page, "/runs", headers={"Host": "evil.example"})[0] == 403
    assert complaint(page, "/runs/0/look", b"{}", {"Content-Type": "text/plain"})[0] == 415


def test_on_the_command_line(tmp_path, run_of):
    with pytest.raises(UserError, match="explore needs a run folder"):
        parse(["explore"])()
    with pytest.raises(UserError, match="none"):
        explore([tmp_path / "none"], port=0, device="cpu", browser=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError) as caught:
            explore([run_of("dense").path], port=taken.getsockname()[1], device="cpu", browser=False)
        assert "cannot listen on port" in one_line(caught.value)
