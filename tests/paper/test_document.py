"""The page: never stale, every published number on it, verdicts by the rule, and nothing that was not run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paper import tables
from paper.claims import claims
from paper.document import Tally, _took, document, write
from paper.evidence import PAPER, Evidence, collapses
from paper.findings import ALL, findings
from paper.verdict import judge, judge_speedup
from tests.paper.fakes import write_results
from tokendepth.report.summary import Stat
from tokendepth.runs.results import read_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Evidence:
    return Evidence.read(write_results(tmp_path_factory.mktemp("results")))


def test_the_page_is_that_of_results(undrawn, tmp_path):
    made = write(ROOT / "results", tmp_path / "REPRODUCTION.md").read_text(encoding="utf-8")
    assert made == (ROOT / "docs" / "REPRODUCTION.md").read_text(encoding="utf-8"), "stale: run make readme"
    for figure in (tmp_path / "figures").glob("*.png"):
        assert (ROOT / "docs" / "figures" / figure.name).exists(), f"{figure.name} is not committed"


# --- the published numbers --------------------------------------------------------------------------------------------


def test_published_numbers_agree_with_each_other():
    """The paper derives two columns from others; a slip in copying them would break that."""
    rows = read_rows(PAPER)
    assert len({row["table"] for row in rows}) == 11
    for row in rows:
        if "bits_per_character" in row:
            assert row["bits_per_character"] == pytest.approx(row["loss"] / math.log(2), abs=2e-4), row
        if "tlops_saved" in row:
            layers = 6
            assert row["tlops_saved"] == pytest.approx((1 - row["active_fraction"]) * (layers - 1) / layers, abs=1.5e-3)
        if "baseline_ms" in row:
            assert row["speedup"] == pytest.approx(row["baseline_ms"] / row["ms"], rel=0.01)


def test_every_published_table_is_complete():
    counted = {
        name: sum(row["table"] == name for row in read_rows(PAPER)) for name in ("penalty", "early-exit", "batch")
    }
    assert counted == {"penalty": 8, "early-exit": 14, "batch": 5}
    assert sum(row["table"] == "wall-clock" for row in read_rows(PAPER)) == 12


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "values", "settings", "verdict"),
    [
        (1.0, None, {}, "not run"),
        (1.0, (1.009,), {}, "reproduced"),
        (1.0, (1.011,), {}, "differs"),
        (1.0, (1.0, 1.06), {}, "reproduced"),  # 0.03 off, two standard deviations are 0.08
        (1.0, (1.0, 1.3), {}, "differs"),  # 0.15 off: so wide a spread excuses nothing
        (0.2, (0.2,), {"saving": True, "collapses": True}, "not supported"),
        (0.2, (0.2,), {"saving": True, "collapses": False}, "reproduced"),
        (0.2, (0.2,), {"collapses": True}, "reproduced"),
        (0.0, (0.0,), {"saving": True, "collapses": True}, "reproduced"),
        (100, (100.0,), {}, "reproduced"),
        (100, (100.5,), {}, "differs"),
    ],
)
def test_the_rule(published, values, settings, verdict):
    assert judge(published, None if values is None else Stat(values), **settings) == verdict


@pytest.mark.parametrize(
    ("published", "ours", "upper_quartile", "verdict"),
    [
        (1.1, None, 0.0, "not run"),
        (1.1, 1.095, 1.2, "reproduced"),
        (1.1, 1.5, 1.6, "reproduced"),
        (1.1, 1.05, 1.08, "differs"),
        (1.1, 0.97, 0.99, "not supported"),
        (1.1, 0.99, 1.01, "differs"),  # a quarter of the passes is faster
        (0.5, 0.4, 0.41, "differs"),
    ],
)
def test_the_rule_for_speed(published, ours, upper_quartile, verdict):
    assert judge_speedup(published, ours, upper_quartile) == verdict


# --- what it says -----------------------------------------------------------------------------------------------------


def test_with_all_numbers_nothing_is_left_open(evidence):
    page = document(evidence, {})
    body = page.split("## Findings")[1]
    assert "not run" not in body
    assert "| Table 2 | TSA | TLOps saved | 22.8% |" in page
    for row in evidence.paper:
        if row["table"] in ("synthetic", "shakespeare", "enwik8", "penalty", "early-exit", "wall-clock", "batch"):
            assert f"| {row['source']} | {row['row']} |" in page
    assert "never" in page


def test_without_numbers_nothing_is_claimed(tmp_path):
    for finding in findings(Evidence.read(tmp_path)):
        own = finding.verdict in ("By the paper's own numbers.", "Note.")
        assert own or "not run" in finding.verdict, finding
        assert "not run" in finding.text, finding


def test_the_page_begins_with_the_answer(evidence, tmp_path):
    page = " ".join(document(evidence, {}).split())
    assert "**In short:** TSA's savings are not supported." in page
    assert page.index("**In short:**") < page.index("## How it was measured")
    judged = [int(page.split(f"| {kind} | ")[1].split(" | ")[0]) for kind in ("reproduced", "differs", "not supported")]
    said = (
        f"Of {sum(judged)} published numbers that can be judged, {judged[0]} are reproduced, {judged[1]} differ, and "
    )
    assert f"{said}{judged[2]} are savings that are not supported." in page
    survives = replace(evidence, runs={key: _executed_as_soft(rows) for key, rows in evidence.runs.items()})
    assert "TSA's savings are supported." in " ".join(document(survives, {}).split())
    assert "TSA's savings (not run)." in " ".join(document(Evidence.read(tmp_path), {}).split())
    assert "**In short" not in document(replace(evidence, quick=True), {})


def test_a_number_that_stands_twice_is_counted_once():
    tally = Tally()
    for verdict in ("differs", "reproduced"):  # the first counts
        tally.add(("TSA", "loss"), verdict)
    tally.add(("TSA", "loss"), "reproduced", second=True)
    lines = dict(line.strip("| ").split(" | ", 1) for line in tally.rows().splitlines())
    assert lines["differs"] == "1 | 0"
    assert lines["reproduced"] == "0 | 1"


def test_claims_are_judged_soft_and_executed(evidence):
    lines = {line.split(" | ")[0].strip("| "): line for line in claims(evidence).splitlines()[2:]}
    assert lines["loss relative to dense at penalty 0.05"].endswith("| does not hold | does not hold |")
    assert lines["halting probability before training"].endswith("| reproduced | — |")
    assert "not run" not in claims(evidence)
    assert claims(Evidence.read(Path("nowhere"))).count("not run") > 10


def test_a_difference_between_experiments_is_taken_seed_by_seed(evidence):
    """The fakes add 0.004 a seed to both, so the ratio moves less than either."""
    against = evidence.against(tables.penalty(0.5), tables.DENSE, "soft", "loss")
    assert against is not None
    assert against.values == pytest.approx([0.19 * 0.5 / (1.44 + 0.004 * seed) for seed in range(3)])
    assert evidence.against(tables.TSA, tables.DENSE, "soft", "nothing") is None


def test_copy_and_sort_collapse_by_accuracy_alone(tmp_path):
    write_results(tmp_path)
    label = "synthetic.copy_tsa"
    assert collapses(Evidence.read(tmp_path), label) is False, "a worse loss at the same accuracy is no collapse"
    rows = read_rows(tmp_path / "reproduction.json")
    for row in rows:
        row["evaluation"]["hard"]["accuracy"] = 0.97
    (tmp_path / "reproduction.json").write_text(json.dumps(rows))
    assert collapses(Evidence.read(tmp_path), label) is True


def test_a_miniature_says_no_verdicts(evidence):
    page = document(replace(evidence, quick=True), {})
    findings_part = page.split("## Findings")[1].split("## Questions that the paper leaves open")[0]
    assert "**" not in findings_part
    claimed = findings_part.split("### Claims in the text")[1]
    assert not any(f"| {verdict} |" in claimed for verdict in ("reproduced", "differs", "holds", "does not hold"))


def test_savings_of_exits_that_were_only_counted_are_judged_by_taking_them(tmp_path):
    write_results(tmp_path)
    rows = read_rows(tmp_path / "reproduction.json")
    for row in rows:
        for point in row["evaluation"]["curve"]:
            point["sparse"]["loss"] *= 2
    (tmp_path / "reproduction.json").write_text(json.dumps(rows))
    page = document(Evidence.read(tmp_path), {})
    second = page.split("### Early exit\n")[1].split("**A second reading.**")[1].split("###")[0]
    lines = [line for line in second.splitlines() if "TLOps saved" in line]
    assert len(lines) == 13
    assert all(line.endswith("| not supported |") for line in lines)


def test_without_rows_no_time_is_of_another_machine(tmp_path):
    page = document(Evidence.read(tmp_path), {})
    assert "| other machine | 0 | 0 |" in page


def verdicts(evidence: Evidence) -> dict[str, str]:
    return {make.__name__: make(evidence).verdict for make in ALL}


def test_findings_follow_the_numbers(evidence):
    found = verdicts(evidence)
    assert collapses(evidence, tables.TSA)
    assert found["hard_execution"] == "Not supported."
    assert found["dense_control"] == "TSA loses."
    assert found["robust"] == "Soft: does not hold; with skipping: does not hold."
    assert found["exit_against_tsa"] == "Soft: holds; with skipping: does not hold."
    assert found["exit_training_cost"] == "Does not hold."
    assert found["read_early"] == "The published losses are closer to real skipping."
    survives = replace(evidence, runs={key: _executed_as_soft(rows) for key, rows in evidence.runs.items()})
    assert verdicts(survives)["hard_execution"] == "Holds."
    assert verdicts(survives)["exit_against_tsa"] == "Soft: holds; with skipping: holds."


def test_exits_are_counted_or_taken_by_which_is_nearer(tmp_path):
    write_results(tmp_path)
    text = (tmp_path / "reproduction.json").read_text()
    swapped = text.replace('"read_early"', '"other"').replace('"sparse"', '"read_early"').replace('"other"', '"sparse"')
    (tmp_path / "reproduction.json").write_text(swapped)
    assert verdicts(Evidence.read(tmp_path))["read_early"] == (
        "The published losses are closer to counting exits without skipping."
    )


def _executed_as_soft(rows: dict) -> dict:
    return {
        seed: {**row, "evaluation": {**row["evaluation"], "hard": row["evaluation"]["soft"]}}
        for seed, row in rows.items()
    }


def test_earlier_rows_of_the_same_config_fill_in_and_never_replace(tmp_path):
    write_results(tmp_path, seeds=2)
    rows = read_rows(tmp_path / "reproduction.json")
    (tmp_path / "reproduction.json").rename(tmp_path / "shakespeare.json")
    (tmp_path / "reproduction.json").write_text("[]")
    only_earlier = Evidence.read(tmp_path).stat(tables.DENSE, "hard", "loss")
    mine = next(row for row in rows if row["name"] == f"{tables.DENSE}-seed1")
    mine["evaluation"]["hard"]["loss"] = 9.0
    (tmp_path / "reproduction.json").write_text("[" + json.dumps(mine) + "]")
    both = Evidence.read(tmp_path).stat(tables.DENSE, "hard", "loss")
    assert only_earlier is not None
    assert both is not None
    assert (only_earlier.values[0], 9.0) == both.values


def test_times_of_two_machines_do_not_mix(evidence, tmp_path):
    write_results(tmp_path)
    rows = read_rows(tmp_path / "wallclock.json")
    cpu = [{**row, "device": "CPU x86_64, 2 threads", "speedup": 77.0} for row in rows]
    (tmp_path / "wallclock.json").write_text(json.dumps(rows + cpu))
    assert all(row["speedup"] != 77 for row in Evidence.read(tmp_path).wallclock)


def test_what_it_took_keeps_what_was_measured_again_apart():
    def call(minutes: float, runs: int, commit: str, table: str = "all") -> dict:
        return {"minutes": minutes, "runs": runs, "commit": commit, "table": table, "device": "a GPU"}

    calls = [call(9.0, 38, "a"), call(3.5, 33, "a"), call(6.0, 8, "a", "scaling"), call(2.0, 4, "b")]
    found = _took(replace(Evidence.read(Path("nowhere")), calls=calls))
    assert "the tables took 12.5 minutes (71 runs in 2 calls) on a GPU, plus 2.0 minutes (4 runs in 1 call)" in found
    assert "the scaling study took 6.0 minutes (8 runs in 1 call) on a GPU." in found
