"""Targets and whether they are met, on made-up runs; and the page matches results/."""

from pathlib import Path
from typing import Any

import pytest

from paper.wanted import SECTIONS, Runs, _accuracy, _against_dense, _at_same_flops, _held, page
from tokendepth.config import BudgetConfig, DataConfig, DenseConfig, ModelConfig, RunConfig, TrainConfig, to_dict
from tokendepth.report.pareto import pareto
from tokendepth.report.results import records
from tokendepth.report.summary import group
from tokendepth.runs.results import Row, add_rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_not_stale():
    assert page(ROOT / "results") == (ROOT / "docs/BUDGET.md").read_text(encoding="utf-8"), "stale: run make readme"


def made_up(
    loss: float, flops: float, seed: int, *, layers: int = 6, budget: float | None = None, task: str = "",
    active: float = 1.0, blocks: list[float] | None = None, **method: Any,
) -> Row:  # fmt: skip
    kind = (
        ("dense" if budget is None else "budget") if not task else f"{task}_{'dense' if budget is None else 'budget'}"
    )
    config = RunConfig(
        DataConfig("enwik8"), ModelConfig(n_layer=layers),
        DenseConfig() if budget is None else BudgetConfig(budget=budget, dial=False, distill=0.0, **method),
        TrainConfig(seed=seed), recipe=f"enwik8.{kind}",
    )  # fmt: skip
    figures = {"loss": loss, "active_fraction": active, "accuracy": min(1.0, max(0.0, 2 - loss))}
    figures["active_fraction_per_site"] = [1.0, *(blocks or [active] * (layers - 1))]
    evaluation = {
        "hard": figures, "sparse": figures, "tlops_skipped": 1 - active, "flops_per_token": flops, "curve": [],
    }  # fmt: skip
    return {
        "name": f"{config.recipe}-seed{seed}",
        "config": to_dict(config),
        "evaluation": evaluation,
        "trained_on": {},
    }


def runs(tmp_path: Path, *rows: Row) -> Runs:
    add_rows(tmp_path / "rows.json", list(rows), identity=("config",))
    return Runs.read(tmp_path / "rows.json")


DENSE = [made_up(1.0 + 0.1 * s, 12.0, s) for s in (0, 1)] + [made_up(1.1 + 0.1 * s, 6.0, s, layers=3) for s in (0, 1)]


@pytest.mark.parametrize(("at_most", "met"), [(0.019, False), (0.021, True), (None, False)])
def test_against_dense_is_seed_by_seed(tmp_path, at_most, met):
    """1.01 / 1.0 and 1.133 / 1.1: 1% and 3%, so 2% with a standard error of 1%."""
    mine = [made_up(1.01, 9.0, 0, budget=0.4, active=0.4), made_up(1.133, 9.0, 1, budget=0.4, active=0.41)]
    found = _against_dense(0.4, at_most=at_most)(runs(tmp_path, *DENSE, *mine))
    assert found is not None
    assert found.words == "+2.00% ± 1.00% at 0.405 active, 59.5% of the work skipped"
    assert (found.met, found.seeds) == (met, 2)


def test_at_the_same_flops_is_the_line_between_dense_models(tmp_path):
    """Halfway between 3 and 6 layers dense models lose 1.05."""
    mine = made_up(1.0395, 9.0, 0, budget=0.4, active=0.4)
    found = _at_same_flops(0.4, at_most=-0.008)(runs(tmp_path, *DENSE, mine))
    assert found is not None
    assert found.words.startswith("-1.00% at 0.400 active")
    assert found.met
    beyond = _at_same_flops(0.7)(runs(tmp_path, made_up(1.0, 20.0, 0, budget=0.7)))
    assert beyond is not None
    assert (beyond.words, beyond.met) == ("no dense models to compare with", False)


def test_a_good_loss_at_too_much_work_is_missed(tmp_path):
    lazy, dear = made_up(0.9, 11.9, 0, budget=0.82, active=0.99), made_up(0.9, 48.0, 0, layers=12, budget=0.34)
    found = runs(tmp_path, *DENSE, lazy, dear)
    for judge, met in (
        (_against_dense(0.82, skipped=0.139), False),
        (_against_dense(0.82), True),
        (_against_dense(0.34, layers=12, at_most=-0.015), False),
    ):
        reached = judge(found)
        assert reached is not None
        assert reached.met is met


def test_a_curve_of_a_model_without_a_dial_is_not_taken_for_models_of_other_budgets(tmp_path):
    """Nor are two runs of one seed taken for one."""
    mine, other = made_up(1.0, 9.0, 0, budget=0.82, active=0.8), made_up(1.0, 9.0, 0, budget=0.4, active=0.4)
    skipped = {"flops_per_token": 5.0, "tlops_skipped": 0, "flops_skipped": 0}
    point = {"budget": 0.4, "sparse": {"loss": 9.0, "active_fraction": 0.4}, **skipped}
    mine["evaluation"]["curve"] = [point]
    found = runs(tmp_path, *DENSE, mine, other)
    assert found.budget(0.4)[0].number("hard", "loss") == 1.0
    assert found.budget(0.82)[0].number("hard", "loss") == 1.0
    twice = Runs([*found.found, *found.found])
    with pytest.raises(AssertionError, match="two runs of one seed"):
        twice.dense()


def test_random_routing_is_no_budget_model(tmp_path):
    found = runs(tmp_path, *DENSE, made_up(1.5, 9.0, 0, budget=0.4, routing="random"))
    assert _against_dense(0.4)(found) is None
    control = _against_dense(0.4, routing="random")(found)
    assert control is not None
    assert control.words.startswith("+50.00%")


def test_a_share_that_was_not_held_is_named(tmp_path):
    found = runs(tmp_path, *(made_up(1.0, 9.0, s, budget=0.4, active=a) for s, a in enumerate((0.401, 0.385))))
    held = _held(within=0.01)(found)
    assert held is not None
    words = "off by at most 0.0150 in a single block; the mean over blocks by at most 0.0150"
    assert (held.words, held.met, held.seeds) == (words, False, 2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"budget": 0.4, "blocks": [0.42, 0.38, 0.4, 0.4, 0.4]},
            "off by at most 0.0200 in a single block; the mean over blocks by at most 0.0000",
        ),
        (
            {"budget": 0.34, "active": 0.37, "layers": 12},
            "off by at most 0.0300 in a single block; the mean over blocks by at most 0.0300",
        ),
        (
            {"budget": 0.6, "active": 0.64, "routing": "random"},
            "off by at most 0.0400 in a single block; the mean over blocks by at most 0.0400",
        ),
    ],
)
def test_a_share_is_held_in_every_block_of_every_row(tmp_path, row, words):
    """Blocks that miss it on either side have the right mean; deeper models and other budgets are not left out."""
    found = runs(tmp_path, *DENSE, made_up(1.0, 9.0, 1, budget=0.4, active=0.4), made_up(1.0, 9.0, 0, **row))
    held = _held(within=0.01)(found)
    assert held is not None
    assert held.words.startswith(words)
    assert held.met is False


def test_rows_of_an_old_calibration_say_so(tmp_path):
    """As long as they are there: the sentence goes with the last of them."""
    section, row = SECTIONS[1], made_up(1.0, 9.0, 0, budget=0.4, active=0.4)
    for commit, said in (
        ("27791e8ca2c1", ["32,768 tokens"]),
        ("ccc76dcc8817", ["the average over blocks"]),
        ("1", []),
    ):
        path = tmp_path / commit / section.file
        add_rows(path, [{**row, "trained_on": {"commit": commit}}], identity=("config",))
        lines = [line for line in page(path.parent).splitlines() if "theirs read" in line]
        assert len(lines) == len(said)
        assert all(words in line for words, line in zip(said, lines, strict=True))


def test_accuracy_and_work_both_count(tmp_path):
    rows = made_up(1.0, 9.0, 0, task="copy"), made_up(1.001, 9.0, 0, task="copy", budget=0.25, active=0.4)
    found = runs(tmp_path, *rows)
    for within, skipped, met in ((0.002, 0.55, True), (0.0005, 0.55, False), (0.002, 0.65, False)):
        reached = _accuracy("copy", 0.25, within=within, skipped=skipped)(found)
        assert reached is not None
        assert reached.words == "60.0% skipped, 0.10 points lost"
        assert reached.met is met


def test_what_was_not_run_says_so(tmp_path):
    text = page(tmp_path)
    assert "| 0.4 vs. dense, 6 layers | at most +0.5% | not run (on the whole split) | 0 |  |" in text
    assert "| met |" not in text
    assert "missed**" not in text
    assert "**Targets met.** not run" in text


def test_the_page_begins_with_how_many_targets_are_met(tmp_path):
    mine = [made_up(1.003, 9.0, s, budget=0.4, active=0.4) for s in (0, 1)]
    add_rows(tmp_path / SECTIONS[0].file, [*DENSE, *mine], identity=("config",))
    assert "**Targets met.** Tiny-Shakespeare: 3 of 3." in page(tmp_path)


def test_a_corpus_has_one_figure_where_costs_differ(tmp_path):
    path = tmp_path / "rows.json"
    mine = [made_up(1.05, 9.0, 0, budget=0.4), made_up(2.5, 9.0, 0, budget=0.4, routing="random")]
    add_rows(path, [*DENSE, *mine], identity=("config",))
    (drawing,) = pareto(group(records(path)))
    assert drawing.name == "pareto_01"
    assert drawing.caption.startswith("enwik8")
    add_rows(tmp_path / "one.json", DENSE[:2], identity=("config",))
    assert pareto(group(records(tmp_path / "one.json"))) == [], "one cost is no trade-off"
