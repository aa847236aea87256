"""Every method by one command: two tables, costs that were measured, nothing done twice, and pages that say it."""

import itertools
import json
import re
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paper import pages, settings
from paper.__main__ import PAPER
from paper.compare import compare
from paper.comparison import document, judge, matched_parameters, trained_alike, verdicts
from paper.grid import Deadline, same
from paper.outcomes import COSTS, OUTSIDE, Outcomes, interpolate
from paper.schematic import ATTENDED, PASSED, SCHEMATICS, WORKED
from paper.settings import RUNS, SETTINGS, SHAKESPEARE, Setting
from paper.tradeoffs import NAMES, series
from tests.shown import every_update
from tests.tiny import hashes
from tokendepth.cli.main import main, parse
from tokendepth.config import DenseConfig
from tokendepth.methods import METHODS
from tokendepth.report.figures import Drawing
from tokendepth.report.palette import look
from tokendepth.report.summary import Stat
from tokendepth.runs.results import read_rows, rows_so_far

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compare")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    """The folder that `compare --quick` was told to fill."""
    out = tmp_path_factory.mktemp("compare")
    main(["compare", "--quick", "--out", str(out)], PAPER)
    return out


@pytest.fixture(scope="module")
def outcomes(quick) -> Outcomes:
    return Outcomes.read(quick / "results", SHAKESPEARE, quick=True)


def setting(title: str) -> Setting:
    return next(one for one in SETTINGS if one.title == title)


# --- the command ------------------------------------------------------------------------------------------------------


def test_every_method_in_miniature(quick, outcomes):
    for one in SHAKESPEARE.settings:
        assert outcomes.stat(one, "loss"), one.title
        cost = outcomes.cost(one)
        assert cost, one.title
        assert cost["time"]["device"].startswith("CPU")
    page = (quick / "docs" / "COMPARISON.md").read_text()
    tuned, shakespeare = page.split("## Tiny-Shakespeare")
    assert tuned.rstrip().endswith("not run")
    assert all(f"| {one.title} | " in shakespeare for one in SHAKESPEARE.settings)
    assert "| not run" not in shakespeare
    assert (quick / "docs" / "figures" / "compare-shakespeare.png").exists()


def test_costs_are_those_of_the_method(outcomes):
    def costs(title: str) -> dict[str, Any]:
        found = outcomes.cost(setting(title))
        assert found
        return found

    dense = costs("dense, 6 layers")
    assert costs("budget 0.4")["training_flops_per_token"] > 2 * dense["training_flops_per_token"]
    assert costs("MoD, capacity 0.125")["training_flops_per_token"] < 0.7 * dense["training_flops_per_token"]

    def kept(title: str) -> tuple[float, float]:
        stored, reserved = (outcomes.stat(setting(title), name) for name in ("kv_bytes", "kv_bytes_reserved"))
        assert stored is not None
        assert reserved is not None
        return stored.mean, reserved.mean

    token = 2 * 4 * 16
    assert kept("budget 0.4") == kept("dense, 6 layers") == (6 * token, 6 * token)
    stored, reserved = kept("ITT, 6 layers, 4 steps")
    assert stored < reserved == 15 * token


def test_what_has_its_rows_is_not_done_again(quick, tmp_path):
    """As on a machine that was handed back: rows are all that is left, and those of one method are lost."""
    shutil.copytree(quick / "results", tmp_path / "results")
    rows, costs = (read_rows(tmp_path / "results" / name) for name in (RUNS, COSTS))
    kept = [row for row in rows if row["config"]["method"]["name"] != "switch"]
    (tmp_path / "results" / RUNS).write_text(json.dumps(kept))
    lost = [row for row in costs if row["config"]["method"]["name"] not in ("act", "dense")]
    (tmp_path / "results" / COSTS).write_text(json.dumps(lost))
    how = {"quick": True, "out": tmp_path / "runs", "results": tmp_path / "results", "show": False}
    assert not compare(**how).left
    trained = {path.parent.name for path in (tmp_path / "runs").glob("*/config.json")}
    assert {name.split("-")[0] for name in trained} == {"shakespeare.switch", "shakespeare.act"}, "act for its costs"
    assert read_rows(tmp_path / "results" / RUNS)[: len(kept)] == kept
    assert len(read_rows(tmp_path / "results" / COSTS)) == len(costs)
    before = hashes(tmp_path)
    assert not compare(**how).left
    assert hashes(tmp_path) == before


def test_out_of_time_it_says_what_is_left(tmp_path):
    done = compare(quick=True, max_minutes=1e-6, out=tmp_path, results=tmp_path / "results", show=False)
    cells = {one.cell + str(one.matched) for one in SHAKESPEARE.settings}
    assert len(done.left) == len(cells) - 1, "half of a miniature's batch is a miniature's batch"
    assert not (tmp_path / "results").exists()


def test_a_call_measures_the_costs_of_what_it_trained(tmp_path, monkeypatch):
    """Its run folders may be gone before the next one."""
    monkeypatch.setattr("paper.compare.TRAINING", 0.0)
    trained, half = tmp_path / "results" / RUNS, time.monotonic() + 50 * 60

    def passed(deadline: Deadline) -> bool:
        """That of training, after four runs, however fast this machine is; the other one is never."""
        return deadline.at is not None and deadline.at < half and len(rows_so_far(trained)) == 4

    monkeypatch.setattr(Deadline, "passed", passed)
    log = every_update(monkeypatch)
    how = {"quick": True, "out": tmp_path / "runs", "results": tmp_path / "results"}
    left = compare(max_minutes=100, **how).left
    assert left
    assert not any(name.startswith("costs") for name in left)
    rows, costs = (read_rows(tmp_path / "results" / name) for name in (RUNS, COSTS))
    assert {row["name"] for row in rows} == {row["name"] for row in costs}
    log.check_told("measuring costs", "settings")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sedes", "3"], "did you mean '--seeds'?"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--max-minutes", "-1"], "--max-minutes is -1"),
        (["shakespeare"], "expected options only"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words], PAPER)
    assert stop.value.code == 2
    answer = capsys.readouterr().err
    assert said in answer
    assert answer.count("\n") == 1


# --- what is compared -------------------------------------------------------------------------------------------------


def test_every_method_is_compared():
    compared = SCHEMATICS.keys() - pages.MEMBERS.keys()
    assert {one.method for one in SETTINGS} == compared | {"random", "two_passes"}
    for method in compared - {"dense", "switch"}:
        levels = {one.level for one in SETTINGS if one.method == method}
        assert {"half", "mild"} <= levels, f"{method} at two budgets"


@pytest.mark.parametrize("one", [s for s in SETTINGS if s.matched], ids=lambda one: one.title)
def test_matched_parameters_are_matched(one):
    (config,) = settings.runs(one, "shakespeare", 1).values()
    plain = replace(config, model=replace(config.model, d_ff=1024), method=DenseConfig())
    assert settings._parameters(config) == pytest.approx(settings._parameters(plain), rel=0.005)


def test_an_exit_threshold_is_chosen_by_work_not_by_loss():
    curve = [(0.9, 0.2, 9.0), (0.7, 0.3, 1.0), (0.5, 0.6, 2.0)]
    points = [{"threshold": t, "tlops_skipped": w, "sparse": {"loss": loss}} for t, w, loss in curve]
    exits = (Setting("", "early_exit", "early_exit", skips=share) for share in (0.24, 0.5))
    assert [one.point({"evaluation": {"curve": points}}) for one in exits] == [0.9, 0.5]


# --- the tables -------------------------------------------------------------------------------------------------------


def test_dense_models_come_to_the_cost_of_a_method():
    line = [(10.0, 2.0), (20.0, 1.0), (30.0, 1.5)]
    assert interpolate(line, 15) == 1.5
    assert interpolate(line, 20) == 1.0
    assert interpolate(line, 28) == pytest.approx(1.4)
    assert interpolate(line, 9.8) == 2.0, "routers cost a little"
    assert interpolate(line, 30.8) == 1.5
    assert interpolate(line, 9.6) == interpolate(line, 31) == OUTSIDE


def made_up(loss: float, flops: float) -> Outcomes:
    """Dense models whose loss is 3 less a tenth a layer, seed by seed apart, and budget 0.4 in their midst.

    Two passes take another 0.2 off.
    """
    config = {one: next(iter(settings.runs(one, "shakespeare", 1).values())) for one in SHAKESPEARE.settings}
    rows: dict[str, dict[int, Any]] = {}
    starts = {"dense": 3.0, "two_passes": 2.8}
    for one in [*(s for s in SETTINGS if s.method in starts), setting("budget 0.4")]:
        layers = config[one].model.n_layer
        plain = starts[one.method] - layers / 10 if one.method in starts else None
        for seed in range(3):
            mean, cost = (loss, flops) if plain is None else (plain, 1e6 * layers)
            blocks = [1.0, 0.41, 0.38, 0.395, 0.395, 0.395] if one.method == "budget" else [1.0] * layers
            figures = {"loss": mean + 0.01 * seed, "active_fraction": 1.0, "active_fraction_per_site": blocks}
            found: dict[str, Any] = {"sparse": figures}
            found |= {"flops_per_token": cost, "tlops_skipped": 0.0, "parameters": 100}
            found["curve"] = [{**found, "budget": 0.4}]
            rows.setdefault(same(config[one], seed=False), {})[seed] = {"evaluation": found, "evaluated_on": {}}
    return Outcomes(SHAKESPEARE, config, rows, {})


def test_a_loss_stands_beside_dense_models_of_its_cost():
    found = made_up(loss=2.6, flops=3.5e6).beside(setting("budget 0.4"))
    assert found is not None
    assert found != OUTSIDE
    dense, difference = found
    assert dense.values == pytest.approx((2.65, 2.66, 2.67)), "seed by seed"
    assert difference.values == pytest.approx((2.6 / 2.65 - 1, 2.61 / 2.66 - 1, 2.62 / 2.67 - 1))
    assert "- better: budget 0.4; two passes" in verdicts(made_up(loss=2.6, flops=3.5e6))
    assert "- worse: budget 0.4." in verdicts(made_up(loss=2.7, flops=3.5e6))
    assert "- outside: budget 0.4." in verdicts(made_up(loss=2.7, flops=7e6))


def test_costs_are_relative_to_six_dense_layers():
    """Dense models that cost a unit per layer in everything; budget 0.4 executes three and a half of them."""
    found = made_up(loss=2.6, flops=3.5e6)

    def cost(training: float, speedup: float) -> dict[str, Any]:
        return {"training_flops_per_token": training, "time": {"speedup": speedup, "device": "CPU"}}

    for one in found.of("dense"):
        layers = found.configs[one].model.n_layer
        found.costs[same(found.configs[one], seed=False), None] = cost(layers, 6 / layers)
    found.costs[same(found.configs[setting("budget 0.4")], seed=False), 0.4] = cost(7, 2)
    ratios = pages.costs_to_dense(found, setting("budget 0.4"))
    expected = {"FLOPs": 3.5 / 6, "training FLOPs": 7 / 6, "parameters": 1, "K/V": 1, "speed": 2}
    assert ratios == pytest.approx(expected)
    assert set(ratios) == set(pages.COSTS), "each has its column"
    cells = pages._figures(found, setting("budget 0.4"))
    assert cells[3:] == ["0.58", "1.17", "1.00", "1.00", "2.00"]


def test_seeds_that_only_some_settings_have_do_not_count():
    found = made_up(loss=2.6, flops=3.5e6)
    seeds = found.rows[same(found.configs[setting("budget 0.4")], seed=False)]
    seeds[3] = seeds[0]
    assert [one.seed for one in found.executed(setting("budget 0.4"))] == [0, 1, 2]


def test_the_same_parameters_are_put_beside_six_layers():
    difference = made_up(loss=2.6, flops=3.5e6).against_six_layers(setting("budget 0.4"))
    assert difference is not None
    assert difference.values == pytest.approx((2.6 / 2.4 - 1, 2.61 / 2.41 - 1, 2.62 / 2.42 - 1))


def test_a_model_of_one_budget_needs_no_curve():
    found = made_up(loss=2.6, flops=3.5e6)
    curved = found.executed(setting("budget 0.4"))
    for row in found.rows[same(found.configs[setting("budget 0.4")], seed=False)].values():
        row["evaluation"] |= {"curve": [], "budget": 0.4}
    assert found.executed(setting("budget 0.4")) == curved
    assert found.curve(setting("budget 0.4")) == []
    assert found.executed(setting("budget 0.7")) == [], "it was not executed there"


def test_rows_of_an_old_calibration_say_so_above_their_tables():
    found = made_up(loss=2.6, flops=3.5e6)
    assert "older calibration" not in document(found, "", "")
    for row in found.rows[same(found.configs[setting("budget 0.4")], seed=False)].values():
        row["evaluated_on"] = {"commit": "2752c6f566f7"}
    said = " ".join(document(found, "", "").split("### Matched parameters")[0].split())
    assert "come from an older calibration" in said
    assert "theirs read 32,768 tokens" in said
    assert "off by at most 0.0200 in a single block; the mean over blocks by at most 0.0050" in said


def test_a_row_without_its_curve_is_not_run():
    found = made_up(loss=2.6, flops=3.5e6)
    for row in found.rows[same(found.configs[setting("budget 0.4")], seed=False)].values():
        row["evaluation"]["curve"] = []
    assert found.executed(setting("budget 0.4")) == []
    assert found.first_row(setting("budget 0.4")) is None
    assert found.executed(setting("dense, 4 layers")) != []


def test_curves_of_one_method_can_be_told_apart():
    looks = [(points.label, points.line) for points in series(made_up(loss=2.6, flops=3.5e6)) if points.line != "none"]
    assert len(set(looks)) == len(looks)
    assert ("early exit by confidence", "solid") in looks
    assert ("early exit by correctness", "dashed") in looks


def test_a_method_has_its_colour_of_the_palette():
    drawn = {points.label: points.colour for points in series(made_up(loss=2.6, flops=3.5e6))}
    compared = {one.method for one in SHAKESPEARE.settings}
    assert len(compared) > 8
    for method, name in NAMES.items():
        if method not in compared:
            continue  # it is on the other page, WHERE_DEPTH_PAYS.md
        known = [colour for label, colour in drawn.items() if label.startswith(name)]
        assert known
        assert set(known) == {look("dense" if method == "two_passes" else method).colour}, name


def test_budget_routing_stands_beside_models_that_were_trained_alike():
    found = trained_alike(made_up(loss=2.6, flops=3.5e6))
    difference = Stat((2.6 / 2.45 - 1, 2.61 / 2.46 - 1, 2.62 / 2.47 - 1)).text("+.2%")
    assert f"| budget 0.4 | 2.6100 ± 0.0100 (n=3) | 2.4600 | {difference} |" in found


def test_the_rule_of_better_and_worse():
    assert judge(Stat((-0.02, -0.021, -0.019))) == "better"
    assert judge(Stat((-0.02, 0.0, 0.02))) == "no clear difference"
    assert judge(Stat((0.02, 0.021))) == "worse"
    assert judge(Stat((0.5,))) == judge(Stat((-0.5,))) == "undecided", "one seed is noise"


def test_only_matched_parameters_are_in_their_table(outcomes):
    table = matched_parameters(outcomes)
    assert "| dense, 6 layers |" in table
    assert "| ACT, ponder cost 0.01, wide |" in table
    assert "| dense, 3 layers |" not in table
    assert "| ACT, ponder cost 0.01 |" not in table


def test_what_was_not_run_has_no_number():
    empty = Outcomes.read(Path("nowhere"), SHAKESPEARE)
    numbers = re.findall(r"\d\.\d{3,}", document(empty, "", "").split("## Tiny-Shakespeare")[1])
    assert [n for n in numbers if n not in ("0.125", "0.001")] == []


# --- the pages --------------------------------------------------------------------------------------------------------


def test_the_pages_are_those_of_results(undrawn, tmp_path):
    shutil.copytree(ROOT / "docs" / "methods", tmp_path / "methods")
    pages.write(ROOT / "results", tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.md"))
    assert len(made) == len(SCHEMATICS) + 1
    for name in made:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), f"{name} is stale: run make readme"
    for figure in (tmp_path / "figures").glob("*.png"):
        assert (ROOT / "docs" / "figures" / figure.name).exists(), f"{figure.name} is not committed"


def test_every_figure_is_shown_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = set(re.findall(r"figures/([\w.-]+)[.]png", "".join(page.read_text() for page in pages)))
    assert {path.stem for path in (ROOT / "docs" / "figures").iterdir()} == shown


@pytest.mark.parametrize("method", SCHEMATICS)
def test_a_page_has_its_equation_figure_and_command(method):
    page = (ROOT / "docs" / "methods" / f"{method}.md").read_text()
    assert "```math" in page
    assert f"figures/method-{method}.png" in page
    assert SCHEMATICS[method].caption in page.replace("\n", " ")
    assert f"<!-- numbers: {method} -->" in page
    commands = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert commands
    for line in commands[1].splitlines():
        assert callable(parse(shlex.split(line)[1:]))


def test_a_page_says_what_is_better_and_worse():
    drawing = {"budget": [Drawing("name", "caption", b"", b"")]}

    def page(loss: float) -> str:
        found = made_up(loss, flops=3.5e6)
        return pages.render("<!-- numbers: budget -->\nold\n<!-- end -->", [found], drawing).replace("\n  ", " ")

    line = r"- budget 0.4: loss {}\d% ± 0.0\d%{}[.]"
    good, bad = page(2.6).split("**Worse than dense models with the same executed FLOPs:**")
    assert "old" not in good
    assert re.search(line.format("-1.8", ""), good)
    alike = " relative to dense models that were also trained with two passes per step"
    assert re.search(line.format("[+]6.1", alike), bad)
    assert "**Worse" not in page(2.4), "better than both"
    assert "**Better than dense models with the same executed FLOPs:** nothing that we measured." in page(2.7)


def test_the_drawings_are_true():
    """Tokens that leave for good do not return, and as many tokens are processed as the caption says."""
    for method in ("early_exit", "act", "mor"):
        rows = [row for label, row in SCHEMATICS[method].layers if label != "last"]
        for below, above in itertools.pairwise(rows):
            assert all(b == WORKED for b, a in zip(below, above, strict=True) if a == WORKED), method
    assert all(row.count(WORKED) == 4 for _, row in SCHEMATICS["budget"].layers[1:])
    assert any(ATTENDED in row for _, row in SCHEMATICS["switch"].layers)
    span = SCHEMATICS["span"]
    (taken,) = {row for _, row in span.layers if PASSED in row}  # one decision for all of its blocks
    assert [PASSED in row for _, row in span.layers] == [False] * 3 + [True] * 4 + [False] * 2, "as the study has it"
    assert span.carried == 6, "from the last of them"
    ends = [place == 0 or not letter.isalnum() for place, letter in enumerate(span.text)]
    assert [letter == WORKED for letter in taken] == ends, "the first token, and where words end"
    assert SCHEMATICS.keys() <= METHODS.keys()
