"""The study of retrofits: the command in miniature, and the rule on made-up rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paper import grid, retrofit_page
from paper.__main__ import PAPER
from paper.retrofit import CONTENDERS, ROWS, SEARCH_ROWS, search_differences, study
from paper.tables import MINIATURE_TOKENS
from tests.tiny import hashes
from tokendepth.cli.main import main
from tokendepth.config import RunConfig, TrainConfig, to_dict
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import evaluate
from tokendepth.retrofit_config import RetrofitConfig
from tokendepth.runs.results import read_rows
from tokendepth.runs.run import Run


@pytest.mark.slow
def test_the_command_in_miniature(tmp_path, capsys):
    line = ["retrofit", "--quick", "--out", str(tmp_path), "--budgets", "0.86,0.7"]
    main([*line, "--search", "--only", "dense,drop"], PAPER)
    page = tmp_path / "docs" / "RETROFIT.md"
    assert capsys.readouterr().out.strip() == str(page)
    tried = {row["name"]: row["evaluation"] for row in read_rows(tmp_path / "results" / SEARCH_ROWS)}
    assert {name.rsplit("-", 2)[0] for name in tried} == {"dense", "drop"}
    assert {one["split"] for one in tried.values()} == {"val"}
    main(line, PAPER)
    rows = {row["name"]: row for row in read_rows(tmp_path / "results" / ROWS)}
    study = [one for one in CONTENDERS if one.default]
    expected = {f"{one.name}-{budget}-seed0" for one in study for budget in ("0.86", "0.7")}
    assert rows.keys() == expected - {"dense-0.7-seed0"}
    for name, row in rows.items():
        evaluation = row["evaluation"]
        assert evaluation["split"] == "test"
        assert evaluation["untouched"]["loss"] > 0
        routed = not name.startswith(("dense", "drop-"))
        assert ("full_budget_loss" in row) == ("agreement" in row) == routed
        if routed:
            assert 0 <= row["agreement"] <= 1
    assert rows["dense-0.86-seed0"]["evaluation"]["block_flops"] == 1
    assert rows["drop-0.7-seed0"]["evaluation"]["block_flops"] == pytest.approx(6 / 8)
    run = Run(tmp_path / "span-0.86-seed0")
    full = evaluate(run, split="test", timing=False, budget=1.0, tokens=MINIATURE_TOKENS)["sparse"]["loss"]
    assert rows["span-0.86-seed0"]["full_budget_loss"] == pytest.approx(full, rel=1e-5)
    losses = {name: one["sparse"]["loss"] for name, one in tried.items() if name.startswith("dense")}
    rate = CONTENDERS[0].rates[int(min(losses, key=losses.__getitem__).rsplit("try", 1)[1])]
    assert rows["dense-0.86-seed0"]["config"]["train"]["lr"] == rate, "the search's choice"
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert all(one.title in text for one in study)
    untouched = tried["dense-0.86-try0"]["untouched"]["loss"]
    assert f"**{min(losses.values()) / untouched - 1:+.2%}**" in text
    assert "n=1: 3 seeds are required" in text
    assert (tmp_path / "docs" / "figures" / "retrofit-base.png").stat().st_size > 1000
    before = hashes(tmp_path / "results")
    main(line, PAPER)
    assert hashes(tmp_path / "results") == before, "what has its row is not repeated"


def made_up(name: str, budget: float, seed: int, loss: float, full: float | None = None) -> dict[str, Any]:
    config = RunConfig(train=TrainConfig(seed=seed), retrofit=RetrofitConfig("runs/base", "0" * 64))
    figures = {"sparse": {"loss": loss}, "block_flops": budget, "untouched": {"loss": 3.0}}
    row: dict[str, Any] = {"name": f"{name}-{budget}-seed{seed}", "config": to_dict(config), "evaluation": figures}
    return row if full is None else {**row, "full_budget_loss": full, "agreement": 0.8}


def judged(folder: Path, rows: list[dict[str, Any]]) -> list[list[str]]:
    (folder / ROWS).write_text(json.dumps(rows))
    (base,) = retrofit_page.bases(folder / ROWS)
    return [target.judged(base) for target in retrofit_page.TARGETS]


def test_targets_are_judged_seed_by_seed(tmp_path):
    rows = [made_up("dense", 0.86, seed, 2.0) for seed in range(3)]
    rows += [made_up("span", 0.86, seed, 2.2 + 0.1 * seed, full=2.009) for seed in range(3)]
    rows += [made_up("drop", 0.86, seed, (2.2 + 0.1 * seed) * 1.0102) for seed in range(3)]
    rows += [made_up("dice", 0.86, seed, (2.2 + 0.1 * seed) * 1.02) for seed in range(3)]
    found = judged(tmp_path, rows)
    assert [line[3] for line in found] == ["met", "", "", "", "met", "missed", ""]
    assert found[0][2] == "-1.01% ± 0.00%"
    assert found[1][2] == found[2][2] == "not run"
    assert found[4][2] == "+0.45% ± 0.00%"
    assert found[5][2] == "-1.96% ± 0.00%"


@pytest.mark.parametrize(("theirs", "verdict"), [(2.01, "met"), (2.003, "undecided"), (1.999, "missed")])
def test_what_is_met_by_less_than_the_line_is_off_is_undecided(tmp_path, theirs, verdict):
    rows = [made_up("span", 0.86, seed, 2.0) for seed in range(3)]
    found = judged(tmp_path, rows + [made_up("replaced", 0.86, seed, theirs) for seed in range(3)])
    assert found[2][3] == verdict


def test_the_page_begins_with_the_result(tmp_path):
    rows = [made_up("dense", 0.86, 0, 2.0), made_up("span", 0.7, 0, 2.5, full=2.1), made_up("drop", 0.7, 0, 2.6)]
    for row in rows:
        row["config"]["retrofit"]["distill"] = 0.0
    (tmp_path / ROWS).write_text(json.dumps(rows))
    text = " ".join(retrofit_page.document(tmp_path / ROWS, {}).split())
    said = (
        "**In short.** At 70% of its block FLOPs, base with a router has a test loss of 2.5000, compared with 2.6000 "
    )
    said += "with blocks dropped instead, 2.0000 fine-tuned with nothing skipped and 3.0000 untouched."
    assert said in text
    assert text.index(said) < text.index("tokendepth retrofit RUN")
    assert "(`--distill 0.5`). The results below were trained without it (`--distill 0`)." in text
    for row in rows:
        row["config"]["retrofit"]["distill"] = 0.5
    (tmp_path / ROWS).write_text(json.dumps(rows))
    assert "The results below were trained" not in retrofit_page.document(tmp_path / ROWS, {})


def test_fewer_seeds_are_said(tmp_path):
    found = judged(tmp_path, [made_up("span", 0.7, 0, 2.0, full=2.0), made_up("drop", 0.7, 0, 2.1)])
    assert found[1][3] == "met, n=1: 3 seeds are required"


def test_models_of_different_cost_are_not_judged(tmp_path):
    dropped = made_up("drop", 0.7, 0, 2.1)
    dropped["evaluation"]["block_flops"] = 0.75
    found = judged(tmp_path, [made_up("span", 0.7, 0, 2.0, full=2.0), dropped])
    assert found[1][2:] == ["\N{EM DASH}", "not judged: the block FLOPs are too far apart"]


def test_models_are_compared_at_the_cost_of_ours(tmp_path):
    """Ours costs halfway between what dropping has at two budgets, so it is compared with the middle of both losses."""
    ours = made_up("span", 0.7, 0, 2.0, full=2.0)
    ours["evaluation"]["block_flops"] = 0.75
    found = judged(tmp_path, [ours, made_up("drop", 0.7, 0, 2.2), made_up("drop", 0.8, 0, 2.0)])
    assert found[1][2].startswith(f"{2.0 / 2.1 - 1:+.2%}")


def test_without_rows_everything_is_not_run(tmp_path):
    text = retrofit_page.write(tmp_path, tmp_path / "RETROFIT.md").read_text()
    assert text.count("not run") == len(retrofit_page.TARGETS) + 2, "the tasks, and the sentence that says so"


def test_tries_that_read_different_text_are_compared_beside_the_untouched_model(tmp_path):
    """The second has the lower loss, on easier text: there the untouched model loses less, too."""
    rows = [dict(made_up("replaced", 0.86, number, loss), name=f"replaced-0.86-try{number}")
            for number, loss in enumerate((2.96, 2.92))]  # fmt: skip
    rows[1]["evaluation"]["untouched"]["loss"] = 2.9
    (tmp_path / SEARCH_ROWS).write_text(json.dumps(rows))
    sha256 = rows[0]["config"]["retrofit"]["sha256"]
    found = search_differences(tmp_path / SEARCH_ROWS, sha256)["replaced"]
    assert found == {0: pytest.approx(2.96 / 3.0 - 1), 1: pytest.approx(2.92 / 2.9 - 1)}
    assert min(found, key=found.__getitem__) == 0


def test_the_page_is_that_of_the_rows(tmp_path):
    root = Path(__file__).resolve().parents[2]
    made = retrofit_page.write(root / "results", tmp_path / "RETROFIT.md").read_text()
    assert (root / "docs" / "RETROFIT.md").read_text() == made, "stale: make readme"


def test_where_the_base_lies_is_no_part_of_an_experiment():
    config = RunConfig(retrofit=RetrofitConfig("runs/base", "0" * 64))
    moved = replace(config, retrofit=RetrofitConfig("elsewhere", "0" * 64))
    other = replace(config, retrofit=RetrofitConfig("runs/base", "1" * 64))
    assert grid.same(config) == grid.same(moved) != grid.same(other)
    assert grid.same(RunConfig()) != grid.same(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "needs --base RUN"),
        ({"quick": True, "only": "span,dces"}, "--only has 'dces': no such contender; did you mean 'dice'?"),
        ({"quick": True, "budgets": "a half"}, "--budgets is 'a half'; expected numbers with commas"),
        ({"quick": True, "seeds": 0}, "--seeds is 0"),
        ({"base": "nowhere"}, "no such run folder"),
    ],
)
def test_a_mistake_is_one_line(settings, said, tmp_path):
    with pytest.raises(UserError) as error:
        study(**settings, out=tmp_path, results=tmp_path, show=False)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
