"""The paper by one command: everything has its row, nothing is done twice, and a stop loses nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paper import grid, tables
from paper.__main__ import PAPER
from paper.evidence import Evidence
from paper.grid import Deadline
from paper.reproduce import CALLS, RUNS, reproduce
from paper.tables import TABLES, runs
from tests.shown import every_update
from tests.tiny import hashes
from tokendepth.cli.main import main, parse
from tokendepth.config import override
from tokendepth.errors import UserError
from tokendepth.recipes import recipe, variants
from tokendepth.runs.results import read_rows, rows_so_far
from tokendepth.runs.run import config_bytes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("reproduce")]


def test_the_whole_paper_in_miniature(quick):
    out, seconds = quick
    assert seconds < 60
    evidence = Evidence.read(out / "results", quick=True)
    for table in (table for table in TABLES.values() if table.in_all):
        for name in runs(table, 1):
            (row,) = evidence.rows(tables.label_of(name))
            assert row["history"], name
            assert row["trained_on"]["commit"]
    for label in tables.ROUTING:
        assert evidence.rows(label, "routing")
    exits = evidence.rows(tables.EARLY_EXIT)[0]["evaluation"]["curve"]
    assert [point["threshold"] for point in exits] == [1.0, *tables.PAPER_THRESHOLDS]
    assert {row["skip"] for row in evidence.wallclock} == {None, "ffn", "block"}
    assert "early_exit_ratio" in evidence.training[0]
    page = (out / "docs" / "REPRODUCTION.md").read_text()
    for drawn in (
        "architecture",
        "shakespeare",
        "enwik8",
        "penalty",
        "early-exit",
        "routing",
        "wall-clock",
        "milestones",
    ):
        assert any(path.stem.endswith(drawn) for path in (out / "docs" / "figures").glob("*.png")), drawn
    assert len(evidence.calls) == 1
    assert evidence.calls[0]["runs"] == len(read_rows(out / "results" / RUNS))
    assert f"({evidence.calls[0]['runs']} runs in 1 call)" in page
    assert page.startswith("> **A miniature**"), "nobody may take it for the paper"


def test_only_what_was_deleted_is_done_again(quick, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(quick[0], out)
    rows = read_rows(out / "results" / RUNS)
    name = f"{tables.penalty(0.05)}-seed0"
    kept = [row for row in rows if row["name"] != name]
    assert len(kept) == len(rows) - 1
    (out / "results" / RUNS).write_text(json.dumps(kept))
    shutil.rmtree(out / name)
    before = {folder: hashes(folder) for folder in out.iterdir() if (folder / "config.json").exists()}
    started = time.perf_counter()
    done = reproduce("all", quick=True, out=out, results=out / "results", show=False)
    assert time.perf_counter() - started < 15
    assert not done.left
    assert not done.failed
    assert (out / name / "eval.json").exists()
    assert {folder: hashes(folder) for folder in before} == before
    again = read_rows(out / "results" / RUNS)
    assert [row for row in again if row["name"] != name] == kept
    assert sum(row["name"] == name for row in again) == 1


def test_rows_are_enough_where_the_folders_are_gone(quick, tmp_path):
    """As on a machine that was handed back: only what was committed is left."""
    shutil.copytree(quick[0] / "results", tmp_path / "results")
    done = reproduce("synthetic", quick=True, out=tmp_path / "runs", results=tmp_path / "results", show=False)
    assert not done.left
    assert not list((tmp_path / "runs").glob("*"))
    assert len(read_rows(tmp_path / "results" / CALLS)) == 1, "a call that had nothing to do took nothing"


def test_out_of_time_it_stops_and_goes_on(tmp_path, monkeypatch):
    settings = {"quick": True, "out": tmp_path / "runs", "results": tmp_path / "results", "show": False}
    wanted, path = len(runs(TABLES["synthetic"], 1)), tmp_path / "results" / RUNS
    first = reproduce("synthetic", max_minutes=1e-6, **settings)
    assert len(first.left) == wanted
    with monkeypatch.context() as patched:  # by the clock, a fast machine would finish
        patched.setattr(Deadline, "passed", lambda deadline: len(rows_so_far(path)) == 2)
        second = reproduce("synthetic", max_minutes=100, **settings)
    assert len(second.left) == wanted - 2
    assert len(read_rows(path)) == 2
    assert not reproduce("synthetic", **settings).left
    assert len(read_rows(path)) == wanted


def test_runs_are_shared_and_seeds_are_counted():
    shared = (
        runs(TABLES["shakespeare"], 3).keys() & runs(TABLES["penalty"], 3).keys() & runs(TABLES["early-exit"], 3).keys()
    )
    assert {tables.label_of(name) for name in shared} == {tables.DENSE, tables.TSA}
    assert sum(name.startswith(tables.penalty(0.05) + "-seed") for name in runs(TABLES["penalty"], 3)) == 3
    second = [name for name in runs(TABLES["penalty"], 3) if name.startswith(tables.penalty(0.05, tables.UNIFORM))]
    assert len(second) == 1, "a second reading has a third of the seeds"
    assert len(runs(TABLES["scaling"], 3)) == 9, "one seed each, whatever is asked"


def test_every_line_of_a_table_has_its_runs_and_its_published_row():
    known, evidence = tables.experiments(), Evidence.read(Path("nowhere"))
    for table in TABLES.values():
        for line in (*table.lines, *table.second_lines):
            assert line.label in known
            assert evidence.published(line.table, line.row)
    for label in (*tables.ROUTING, *(tables.scaled(size, method) for size in tables.SIZES for method in tables.SCALED)):
        assert label in known
    for layers in tables.LAYERS:
        assert known[tables.fewer(layers)].model.n_layer == layers


def test_an_experiment_is_known_whatever_machine_it_ran_on():
    here = tables.experiments()[tables.TSA]
    elsewhere = replace(here, train=replace(here.train, compile="on", log_every=7), recipe="another name")
    other = replace(here, train=replace(here.train, seed=5))
    assert grid.same(here) == grid.same(elsewhere) != grid.same(other)
    assert grid.same(here, seed=False) == grid.same(other, seed=False)


def test_a_failed_run_is_named_and_stops_nothing(tmp_path, monkeypatch):
    broken = tables.Table("x", ("demo.dense:data.corpus=text:nowhere.txt",))
    monkeypatch.setitem(TABLES, "batch", broken)
    done = reproduce("batch", seeds=1, out=tmp_path / "runs", results=tmp_path / "results", show=False)
    ((name, words),) = done.failed.items()
    assert name.startswith("demo.dense")
    assert "nowhere.txt" in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["enwik9"], "did you mean 'enwik8'?"),
        (["all", "--seeds", "0"], "--seeds is 0"),
        (["all", "--max-minutes", "-1"], "--max-minutes is -1"),
        (["all", "--max-minutes", "soon"], "max_minutes"),
        (["all", "--max-minute", "1"], "did you mean '--max-minutes'?"),
        ([], "expected one argument"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", *words], PAPER)
    assert stop.value.code == 2
    answer = capsys.readouterr().err
    assert said in answer
    assert answer.count("\n") == 1


def test_the_help_names_every_table(capsys):
    with pytest.raises(SystemExit):
        parse(["reproduce", "--help"], PAPER)
    said = capsys.readouterr().out
    assert all(name in said for name in ("all", *TABLES))


def test_a_run_in_a_foreign_process_is_written_down_too(tmp_path):
    """The way of a GPU: processes of `sweep`, a row for each as it ends, and for those that had ended before."""
    config = tables.miniature(runs(TABLES["synthetic"], 1)["synthetic.copy_dense-seed0"])
    path = tmp_path / "rows.json"
    for _ in range(2):  # the second time the folder is there and its row is not
        progress = grid.fill({"a": config}, tmp_path / "runs", path, grid.Deadline(), tokens=64, show=False)
        assert not progress.failed
        (row,) = read_rows(path)
        assert row["name"] == "a"
        path.unlink()


def test_an_unknown_table_is_a_user_error():
    with pytest.raises(UserError, match="no such table"):
        reproduce("tabel")


def test_it_needs_no_packages_but_the_core(tmp_path):
    """A bare GPU machine has neither tyro nor matplotlib; the page is made elsewhere."""
    code = (
        "import sys\nfor name in ('tyro', 'matplotlib', 'jinja2'):\n    sys.modules[name] = None\n"
        "from pathlib import Path\nfrom paper.reproduce import reproduce\n"
        f"reproduce('batch', quick=True, results=Path({str(tmp_path)!r}), out=Path({str(tmp_path / 'runs')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_rows(tmp_path / "wallclock.json")


def test_interrupted_it_keeps_what_it_has_and_goes_on(tmp_path):
    words = [sys.executable, "-m", "paper", "reproduce", "synthetic", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    rows, until = tmp_path / "results" / RUNS, time.monotonic() + 60
    while not rows.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "is saved; repeat the command to continue" in said
    kept = read_rows(rows)
    assert 0 < len(kept) < len(runs(TABLES["synthetic"], 1))
    assert not reproduce("synthetic", quick=True, out=tmp_path, results=tmp_path / "results", show=False).left
    assert read_rows(rows)[: len(kept)] == kept
    assert len(read_rows(rows)) == len(runs(TABLES["synthetic"], 1))


def test_it_tells_how_far_it_is(tmp_path, monkeypatch):
    log = every_update(monkeypatch)
    two = dict(list(runs(TABLES["synthetic"], 1).items())[:2])
    configs = {name: tables.miniature(config) for name, config in two.items()}
    grid.fill(configs, tmp_path, tmp_path / "rows.json", grid.Deadline(), tokens=tables.MINIATURE_TOKENS, here=True)
    log.check_told("training and evaluating", "runs")
    for name in configs:
        assert any(f", {name}, " in line for line in log.about("training and evaluating"))


def test_on_a_gpu_studies_compile_unless_told_otherwise(monkeypatch, tmp_path):
    found = variants("shakespeare.dense", 1)
    found |= {"cpu": override(recipe("shakespeare.dense"), {"train.device": "cpu"})}
    found |= {"off": override(recipe("shakespeare.dense"), {"train.compile": "off"})}
    for gpu, expected in ((True, ["on", "auto", "off"]), (False, ["auto", "auto", "off"])):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        assert [config.train.compile for config in grid._compiled(found, tmp_path).values()] == expected
    begun = next(iter(found.values()))
    (tmp_path / "shakespeare.dense-seed0").mkdir()
    (tmp_path / "shakespeare.dense-seed0" / "config.json").write_bytes(config_bytes(begun))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    compiled = grid._compiled(found, tmp_path)["shakespeare.dense-seed0"]
    assert compiled == begun, "it goes on as it was begun"
    assert grid.same(found["shakespeare.dense-seed0"]) == grid.same(found["off"]), "it is the same experiment"
