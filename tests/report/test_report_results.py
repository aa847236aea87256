"""Rows of results files, and the README's tables generated from them."""

import json

import pytest

from benchmarks.faults.registry import FAULTS
from paper.generated import render
from tests.report.fakes import tsa_evaluation
from tokendepth.errors import UserError
from tokendepth.report import collect, markdown_table, rows
from tokendepth.report.results import records
from tokendepth.report.summary import group
from tokendepth.runs.results import add_rows, read_rows


def test_a_row_takes_the_place_of_the_one_it_repeats(tmp_path):
    path = tmp_path / "new" / "rows.json"
    add_rows(path, [{"shape": "a", "ms": 1}, {"shape": "b", "ms": 2}], identity=("shape",))
    add_rows(path, [{"shape": "a", "ms": 3}, {"shape": "c", "ms": 4}], identity=("shape",))
    assert read_rows(path) == [{"shape": "a", "ms": 3}, {"shape": "b", "ms": 2}, {"shape": "c", "ms": 4}]
    assert len(path.read_text().splitlines()) == 5, "one row a line"


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "rows.json").write_text('{"no": "list"}')
    with pytest.raises(UserError, match="not a results file"):
        add_rows(tmp_path / "rows.json", [], identity=())


def test_a_table_from_results_is_the_table_from_the_runs(make_run, tmp_path):
    run = make_run("tsa", evaluation=tsa_evaluation())
    collect([run], tmp_path / "rows.json")
    assert markdown_table(group(records(tmp_path / "rows.json"))) == markdown_table(rows([run]))
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert "passage" not in row["evaluation"], "rows are small"
    assert row["config"]["train"]["seed"] == run.config.train.seed


def test_a_run_that_was_not_evaluated_gives_no_row(make_run, tmp_path):
    with pytest.raises(UserError, match="not finished and evaluated"):
        collect([make_run("tsa")], tmp_path / "rows.json")
    assert not (tmp_path / "rows.json").exists()


def test_only_the_marked_part_of_a_readme_is_made_anew(make_run, tmp_path):
    collect([make_run("tsa", evaluation=tsa_evaluation())], tmp_path / "rows.json")
    before, after = "# Title\n<!-- results: rows.json -->\n", "<!-- end -->\nThe rest.\n"
    made = render(before + "stale\n" + after, tmp_path)
    assert made.startswith(before + "| run |")
    assert made.endswith(after)
    assert "stale" not in made
    assert render(made, tmp_path) == made


def test_the_training_table_shows_medians_and_quartiles(tmp_path):
    step = {"benchmark": "training step", "shape": "d8", "device": "abacus", "dtype": "float32"}
    times = {"dense_ms": [2.0, 1.5, 2.5], "tsa_ms": [2.1, 1.6, 2.6], "ratio": [1.05, 1.04, 1.06]}
    whole = {"benchmark": "whole run", "recipe": "r", "steps": 5000, "device": "abacus", "seconds": 9.87}
    add_rows(tmp_path / "t.json", [{**step, **times}, {**whole, "seconds_stepping": 5.43}], identity=("benchmark",))
    made = render("<!-- training: t.json -->\n<!-- end -->", tmp_path)
    assert "| abacus, float32 | d8 | 2.00 (1.50 to 2.50) | 2.10 (1.60 to 2.60) | 1.050 (1.040 to 1.060) |" in made
    assert "r, 5,000 steps on abacus: 9.9 s" in made


def test_the_faults_table_has_the_other_trainers_figures_in_a_column_of_their_own(tmp_path):
    row = {"title": "a kill", "claim": "nothing lost", "attempts": 1234, "failed": 0, "figures": {}, "device": "CPU"}
    rows = [
        {**row, "fault": "flood", "figures": {"runs": 7, "max difference": 0.0}},
        {**row, "fault": "fire", "failed": 2},
        {**row, "fault": "frost", "figures": {"max difference": 0.000123}, "device": "abacus"},
    ]
    add_rows(tmp_path / "f.json", rows, identity=("fault",))
    other = [{"fault": "flood", "trainer": "Other 1.0", "outcome": "39 of 100 refused"}]
    add_rows(tmp_path / "faults_baseline.json", other, identity=("fault",))
    made = render("<!-- faults: f.json -->\n<!-- end -->", tmp_path).splitlines()
    assert made[1] == "| fault | tried | outcome | Other 1.0 |"
    assert made[3] == "| a kill | 1,234 | nothing lost (max difference 0) | 39 of 100 refused |"
    assert made[4] == "| a kill | 1,234 | **2 failures**, otherwise: nothing lost | \u2014 |"
    assert made[5] == "| a kill | 1,234 | nothing lost (max difference 0.00012; abacus) | \u2014 |"
    add_rows(tmp_path / "f.json", [{**row, "fault": "kill"}], identity=("fault",))
    made = render("<!-- faults: f.json -->\n<!-- end -->", tmp_path)
    assert f"| {FAULTS['kill'].title} | 1,234 | {FAULTS['kill'].claim} | \u2014 |" in made, "as the suite words it"
