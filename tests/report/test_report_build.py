"""The report folder: a self-contained page, non-empty figures, and robustness against every kind of run."""

import json
import os
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import tokendepth.runs
from tests.report.fakes import TEXT, dense_evaluation, metrics, passage, tsa_evaluation, write_run
from tokendepth.errors import UserError
from tokendepth.report import build, markdown_table, rows
from tokendepth.report.heatmap import COLUMNS, LINES

ROOT = Path(tokendepth.runs.__file__).parents[1]


class Page(HTMLParser):
    """Every tag with its attributes, and the text outside of style and script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[Path, Page]:
    folder, env = tmp_path_factory.mktemp("report"), {"torch": "2.13.0"}
    collapsed = tsa_evaluation(1.4519, 2.2159)
    runs = [
        write_run(folder / "dense", "dense", evaluation=dense_evaluation(), rows=metrics(1.4422)),
        write_run(folder / "tsa", evaluation=collapsed, rows=metrics(1.45, active=0.7), env=env),
    ]
    path = build(runs, folder / "out")
    return path, Page(path)


def test_the_folder_is_complete_and_its_figures_show_something(report):
    out = report[0].parent
    names = {"overview_01", "loss_steps", "loss_tlops", "active_fraction", "pareto_01", "tokens_01"}
    assert report[0] == out / "report.html"
    assert {p.name for p in out.iterdir()} == {"report.html", "table.md", "table.json", "figures"}
    assert {p.name for p in (out / "figures").iterdir()} == {f"{n}.{s}" for n in names for s in ("svg", "png")}
    for name in names:
        svg, png = (out / "figures" / f"{name}.svg").read_text(), (out / "figures" / f"{name}.png").read_bytes()
        assert svg.count("<path") > 20
        assert "<text" not in svg
        assert "</svg>" in svg
        width, height = struct.unpack(">II", png[16:24])
        assert png.startswith(b"\x89PNG")
        assert width >= 700
        assert height >= 400
        assert len(png) > 10_000
        resolution = png.index(b"pHYs") + 4
        assert struct.unpack(">I", png[resolution : resolution + 4]) == (7874,)  # per metre: 200 per inch
    # One image per router, line of text and mode, and one for the legend.
    shown = TEXT[TEXT.index("Citizen") :]  # from the first word that is certainly whole
    lines = min(-(-len(shown) // COLUMNS), LINES)
    assert (out / "figures" / "tokens_01.svg").read_text().count("<image") == 5 * lines * 2 + 1


def test_the_tables_beside_the_page_are_the_same_rows(report, make_run):
    out = report[0].parent
    tree = json.loads((out / "table.json").read_text())
    assert [row["label"] for row in tree["rows"]] == ["dense", "tsa"]
    assert (out / "table.md").read_text().startswith("| run | method | params | loss (soft) |")
    for part in ("1.4519", "2.2159", "22.8%", "32.2%", "24.9%", "1.24x", "(cpu, batch 8)", "4,864,901"):
        assert part in report[1].text
        assert part in (out / "table.md").read_text()


def test_the_page_needs_no_other_file(report):
    page = report[1]
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "img"}
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            value = attrs.get(name) or "#"
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
    assert "@import" not in page.source
    assert "fetch(" not in page.source
    assert set(re.findall(r"https?://[^\"' )]+", page.source)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"  # XML namespaces, not addresses
    }  # fmt: skip


def test_figures_are_inline_with_ids_of_their_own_and_the_ink_of_the_page(report):
    page = report[1]
    assert len(page.all("svg")) == 6
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page.source))
    assert wanted
    assert wanted <= set(ids)
    body = page.source[page.source.index("<body") :]
    assert "currentColor" in body
    assert "#1c2733" not in body
    assert "#ffffff" not in body


def test_the_page_says_what_it_must(report):
    text = report[1].text
    for part in (
        "† collapses when executed", "Glossary", "dense and tsa were trained on shakespeare for 5,000 steps each",
        "skips 32.2% of the work", "Timed: a forward pass with skipping, on cpu, batch 8.", "2.13.0",
        "tokendepth report", "one seed: differences under 0.9% are noise", "loss 2.3100, active fraction 0.710",
        "control: untrained router soft",
    ):  # fmt: skip
        assert part in text
    assert "not which model is better" not in text, "5,000 steps"
    badges = [attrs for attrs in report[1].all("b") if attrs.get("class") == "badge"]
    assert len(badges) == 1
    styles = report[1].source
    assert "prefers-color-scheme: dark" in styles
    assert 'name="viewport"' in styles


def test_each_character_is_a_span_with_both_shades_and_every_router(report):
    page, told, first = report[1], passage(), TEXT.index("Citizen")
    spans = [attrs for attrs in page.all("span") if "--hard" in attrs.get("style", "")]
    assert len(spans) == len(TEXT) - first
    assert spans[0]["title"].splitlines()[0].startswith("C  surprisal (soft) ")
    for t in (7, 11, 46):
        lines = spans[t - first]["title"].splitlines()
        assert lines[0].endswith(f"surprisal (soft) {told['surprisal'][t]:.2f} nats")
        for s in range(5):
            decision = "active" if told["hard"][s][t] else "skipped"
            assert lines[1 + s] == f"block {s + 2}: gate {told['soft'][s][t]:.2f}, {decision}"
        depth = sum(row[t] for row in told["hard"]) / 5
        assert spans[t - first]["style"].endswith(f"--hard:{depth:.2g}")
    assert "↵" in page.text
    assert "Before·we·proceed" in page.text
    assert len([a for a in page.all("input") if a["type"] == "radio"]) == 2


def test_everything_from_a_run_is_escaped(make_run, tmp_path):
    evil = "<script>alert(1)<!-- & \"'"
    evaluation = tsa_evaluation(text="<script>alert(2)</script>&\"'")
    evaluation["passage"]["sites"][0] = "<script>alert(3)</script>"
    evaluation["passage"]["pieces"][0] = "<img src=x onerror=alert(4)>"
    evaluation["time"]["device"] = "<script>alert(5)</script>"
    env = {"<script>alert(6)</script>": "<script>alert(7)</script>"}
    run = make_run(evil, evaluation=evaluation, rows=metrics(until=500), env=env)
    page = Page(build([run], tmp_path / "out", title="<script>alert(8)</script>"))
    assert page.all("script") == [{}]
    assert not page.all("img")
    for n in (1, 2, 3, 5, 6, 7, 8):
        assert f"<script>alert({n})" not in page.source
    assert evil in page.text
    assert "<script>alert(8)</script>" in page.text
    assert "&lt;script&gt;alert(6)" in page.source


def test_names_that_matplotlib_or_utf8_would_trip_over(make_run, tmp_path):
    names = ["$x_{", "_hidden", "new\nline", "日本語", os.fsdecode(b"bad\xff"), "n" * 120]
    runs = [make_run(name, rows=metrics(until=500), penalty=i) for i, name in enumerate(names)]
    # A byte that is not UTF-8 may decode to a lone surrogate, which UTF-8 cannot encode.
    runs[0].write_evaluation(tsa_evaluation(text="x a$^ \udc80\x00\t日"))
    text = Page(build(runs, tmp_path / "out")).text
    for shown in ("$x_{", "_hidden", "new▯line", "日本語", "bad▯", "n" * 120, "a$^·▯▯→日"):
        assert shown in text


def test_runs_without_evaluation_give_curves_only(make_run, tmp_path):
    run = make_run("half", rows=metrics(until=1600), finished=False)
    page = Page(build([run], tmp_path / "out"))
    assert {p.stem for p in (tmp_path / "out" / "figures").iterdir()} == {"loss_steps", "loss_tlops"}
    assert "not finished: half (step 1,600 of 5,000)" in page.text
    assert "token by token" not in page.text


def test_a_run_of_nothing_gives_a_page_without_figures(make_run, tmp_path):
    page = Page(build([make_run("bare", finished=False)], tmp_path / "out"))
    assert list((tmp_path / "out" / "figures").iterdir()) == []
    assert not page.all("svg")
    assert "not evaluated: bare" in page.text
    assert "step 0 of 5,000" in page.text


def test_dense_only_has_no_router_to_show(make_run, tmp_path):
    build([make_run("d", "dense", evaluation=dense_evaluation(), rows=metrics(until=500))], tmp_path / "out")
    drawn = {p.stem for p in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {"overview_01", "loss_steps", "loss_tlops"}


def test_a_method_without_a_soft_mode(make_run, tmp_path):
    evaluation = tsa_evaluation()
    evaluation["soft"] = evaluation["passage"]["soft"] = None
    del evaluation["tlops_saved_soft"], evaluation["time"], evaluation["passage"]["surprisal"]
    page = Page(build([make_run("hard", evaluation=evaluation)], tmp_path / "out"))
    assert not page.all("input")
    assert "only-hard" in page.source
    assert "gate 0" not in page.source
    drawn = {p.stem for p in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {"overview_01", "active_fraction", "tokens_01"}


@pytest.mark.slow
def test_many_runs_on_two_corpora(make_run, tmp_path):
    each = {"evaluation": tsa_evaluation(text="ab c"), "rows": metrics(until=750)}
    runs = [make_run(f"run{i}", **each, penalty=i, corpus=("enwik8", "stdlib")[i % 2]) for i in range(5)]
    page = Page(build(runs, tmp_path / "out"))
    assert len(page.all("svg")) == 2 + 3 + 5
    assert all(f"run{i}" in page.text for i in range(5))


def test_models_that_were_hardly_trained_are_not_judged(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("tokendepth.report.page.SHORT", 5001)
    page = Page(build([make_run("d", "dense", evaluation=dense_evaluation())], tmp_path / "out"))
    assert "Trained for 5,000 steps or fewer: that shows how it works, not which model is better." in page.text


def test_a_rebuilt_report_keeps_no_figure_of_the_old_one_and_no_other_file_is_touched(make_run, tmp_path):
    out = tmp_path / "out"
    build([make_run("tsa", evaluation=tsa_evaluation(text="abc"))], out)
    (out / "figures" / "mine.png").write_bytes(b"")
    (out / "notes.txt").write_text("mine")
    build([make_run("d", "dense", evaluation=dense_evaluation())], out)
    assert {p.stem for p in (out / "figures").iterdir()} == {"mine", "overview_01"}
    assert (out / "notes.txt").exists()


def test_the_same_runs_give_the_same_bytes(make_run, tmp_path):
    runs = [make_run("tsa", evaluation=tsa_evaluation(text="ab c"), rows=metrics(until=500))]
    first, second = build(runs, tmp_path / "a").parent, build(runs, tmp_path / "b").parent
    files = [p.relative_to(first) for p in first.rglob("*") if p.is_file()]
    assert len(files) == 3 + 10
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def test_user_mistakes_are_one_line(make_run, tmp_path):
    run = make_run("tsa", evaluation=tsa_evaluation())
    with pytest.raises(UserError, match="no runs were given"):
        build([], tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; expected a folder"):
        build([run], tmp_path / "file")
    with pytest.raises(UserError, match="not a folder; choose another"):
        build([run], tmp_path / "file" / "below")
    run.write_evaluation({**tsa_evaluation(), "passage": {**passage(), "hard": [[0, 1]]}})
    with pytest.raises(UserError, match=r"passage\.hard is not 5 rows of \d+ numbers") as caught:
        build([run], tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def python(code: str, *blocked: str) -> subprocess.CompletedProcess:
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, env=environment)


def test_it_runs_without_torch(make_run, tmp_path):
    run = make_run("tsa", evaluation=tsa_evaluation(text="ab c"), rows=metrics(until=500))
    code = (
        "from pathlib import Path\nfrom tokendepth.runs.run import Run\n"
        "from tokendepth.report import build, terminal_table\n"
        f"run = Run.open({str(run.path)!r})\nterminal_table([run])\nbuild([run], Path({str(tmp_path / 'out')!r}))\n"
        "print(sorted(n for n in sys.modules if n.startswith('tokendepth.') and not n.startswith('tokendepth.report')))"
    )
    done = python(code, "torch")
    assert done.returncode == 0, done.stderr
    runs = ("checkpoints", "files", "metrics", "results", "run", "shapes")
    configs = ("config", "config_base", "data_config", "method_configs", "retrofit_config", "span_config")
    allowed = (*configs, "checks", "errors", "trace", "runs", *(f"runs.{name}" for name in runs))
    assert set(eval(done.stdout)) <= {f"tokendepth.{name}" for name in allowed}
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_missing_extra_names_its_remedy_and_the_tables_need_none(make_run, tmp_path, missing):
    run = make_run("tsa", evaluation=tsa_evaluation(text="ab c"))
    code = (
        "from tokendepth.report import build, markdown_table, rows\nfrom tokendepth.runs.run import Run\n"
        "from tokendepth.errors import UserError\n"
        f"run = Run.open({str(run.path)!r})\nprint(markdown_table(rows([run])))\n"
        f"try:\n    build([run], {str(tmp_path / 'out')!r})\nexcept UserError as error:\n    print('said:', error)"
    )
    done = python(code, missing)
    assert markdown_table(rows([run])) in done.stdout
    assert f"said: the report needs {missing}, not installed; pip install 'tokendepth[report]'" in done.stdout
