"""python -m paper score: runs become rows of tasks.json, and rows the tables of docs/RETROFIT.md."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import tokendepth as td
from paper import retrofit_page
from paper.__main__ import PAPER
from paper.task_scores import IDENTITY, ROWS, TASKS, base_of, lambada, score_runs, section, task_row
from tests.tiny import one_line, tiny
from tokendepth.cli.main import main
from tokendepth.config import DenseConfig, ModelConfig, RunConfig, SpanConfig, TrainConfig, method_name, to_dict
from tokendepth.data.tasks import Item, write_tasks
from tokendepth.errors import UserError
from tokendepth.measure import tasks
from tokendepth.measure.tasks import score_run
from tokendepth.retrofit_config import RetrofitConfig
from tokendepth.runs.results import add_rows, read_rows
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

pytestmark = pytest.mark.xdist_group("task_scores")
BASE, OTHER = "0" * 64, "1" * 64
STEPS = {"train.steps": 2, "train.checkpoint_every": 2, "train.eval_every": 2, "train.device": "cpu"}
ITEMS = [Item(f"{n} green bottles hanging on the", (" wall", " llaw"), 0) for n in range(1, 6)]


def figures(accuracy: float, **more: Any) -> dict[str, Any]:
    """Per character five points more."""
    plain = {"items": 500, "accuracy": accuracy, "standard_error": 0.022, "tokens": 100, "block_flops": 1.0}
    return {**plain, "accuracy_per_character": accuracy + 0.05, "standard_error_per_character": 0.021, **more}


def config_of(name: str, drop: int = 0) -> RunConfig:
    contender, _, seed = name.rsplit("-", 2)
    method = SpanConfig(begin=1, length=2, budget=0.5) if contender == "span" else DenseConfig()
    retrofit = RetrofitConfig("runs/smollm2", BASE, drop=drop)
    shape, schedule = ModelConfig(n_layer=6 - drop), TrainConfig(seed=int(seed.removeprefix("seed")))
    return RunConfig(model=shape, method=method, train=schedule, retrofit=retrofit)


def made_up(
    name: str,
    accuracy: float,
    *,
    config: RunConfig | None = None,
    budget: float | None = None,
    tasks: Iterable[str] = TASKS,
    **more: Any,
) -> dict[str, Any]:
    config = config or config_of(name)
    how = {"method": method_name(config.method), "execution": "sparse", "budget": budget}
    found = {task: figures(accuracy, **more) for task in tasks}
    return task_row(name, config, BASE, {**how, "tasks": found, "env": {"device": "Abacus 9000"}})


def untouched(accuracy: float) -> dict[str, Any]:
    return made_up("smollm2", accuracy, config=RunConfig(method=DenseConfig()))


def page(folder: Path, *rows: dict[str, Any]) -> str:
    add_rows(folder / ROWS, list(rows), IDENTITY)
    return section(folder / ROWS)


def line(text: str, start: str) -> list[str]:
    """The cells of the one line that begins so, without its title."""
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in found.split("|")[2:-1]]


def test_each_task_has_the_accuracy_that_others_report(tmp_path):
    text = page(tmp_path, untouched(0.6))
    assert line(text, " | budget") == [
        "budget", "PIQA", "ARC easy", "ARC challenge", "HellaSwag", "LAMBADA", "block FLOPs", "n",
    ]  # fmt: skip
    plain, scaled = "60.0 ± 2.2", "65.0 ± 2.1"
    assert line(text, "untouched") == ["\u2014", plain, plain, scaled, scaled, plain, "1.000", "1"]


def test_three_seeds_have_a_spread_and_fewer_the_error_of_the_items(tmp_path):
    rows = [made_up(f"span-0.70-seed{seed}", 0.5 + 0.01 * seed, block_flops=0.71) for seed in range(3)]
    rows += [made_up(f"span-0.86-seed{seed}", 0.6 + 0.01 * seed, block_flops=0.85) for seed in range(2)]
    text = page(tmp_path, *rows)
    titles = [row.split("|")[2].strip() for row in text.splitlines() if row.startswith("| span (linear")]
    assert titles == ["0.86", "0.70"], "more first"
    many, few = (line(text, f"span (linear map for skipped tokens) | {at}") for at in (0.7, 0.86))
    assert (many[1], many[3], *many[-2:]) == ("51.0 ± 1.0", "56.0 ± 1.0", "0.710", "3")
    assert (few[1], few[3], *few[-2:]) == ("60.5 ± 2.2", "65.5 ± 2.1", "0.850", "2")


def test_dropped_blocks_are_a_share_of_those_of_the_base(tmp_path):
    name = "drop-0.7-seed0"
    text = page(tmp_path, made_up(name, 0.5, config=config_of(name, drop=2)))
    assert line(text, "blocks dropped")[-2] == "0.667", "executed all of four of six blocks"


def test_flops_are_weighted_by_tokens(tmp_path):
    row = made_up("span-0.7-seed0", 0.5, tasks=("piqa", "lambada"), block_flops=0.6)
    row["tasks"]["lambada"] |= {"tokens": 300, "block_flops": 0.8}
    cells = line(page(tmp_path, row), "span (linear")
    assert cells[-2] == "0.750"
    assert cells[2:5] == ["not run"] * 3


def test_other_budgets_are_no_part_of_the_tables_and_more_items_win(tmp_path):
    name = "span-0.7-seed0"
    rows = [made_up(name, 0.7, items=900), made_up(name, 0.5, items=200), made_up(name, 0.99, budget=1.0, items=900)]
    text = page(tmp_path, *rows)
    assert len(read_rows(tmp_path / ROWS)) == 3
    assert line(text, "span (linear")[1] == "70.0 ± 2.2"
    assert "SmolLM2-135M-Instruct: 900 items per task; the standard error is up to 2.2 points" in text
    page(tmp_path, made_up(name, 0.8, items=900))
    assert len(read_rows(tmp_path / ROWS)) == 3, "replaced"
    assert line(section(tmp_path / ROWS), "span (linear")[1] == "80.0 ± 2.2"


def test_tasks_of_different_sizes_and_seeds_are_told(tmp_path):
    rows = [made_up("span-0.7-seed0", 0.5, tasks=("piqa",), items=1838), made_up("span-0.7-seed1", 0.5)]
    text = page(tmp_path, *rows)
    assert "items: PIQA 500 or 1,838, ARC easy 500," in text
    assert line(text, "span (linear")[1:3] == ["50.0 ± 2.2", "50.0 ± 2.2 (n=1)"]


def test_unequal_flops_are_named(tmp_path):
    ours, theirs = (made_up(f"{name}-0.7-seed0", 0.5, block_flops=0.74) for name in ("span", "dice"))
    assert "executed the same FLOPs" not in page(tmp_path, ours, theirs)
    text = " ".join(page(tmp_path, made_up("dice-0.7-seed0", 0.5, block_flops=0.7)).split())
    said = (
        "at budget 0.70 `span (linear map for skipped tokens)` executed 0.740 of the block FLOPs, others down to 0.700"
    )
    assert f"Not all rows executed the same FLOPs: {said}." in text
    assert lambada(tmp_path, "smollm2", "span", 0.7) == pytest.approx((0.5, 0.74))
    assert lambada(tmp_path, "smollm2", "span", 0.86) is None


def test_every_base_has_its_table(tmp_path):
    text = page(tmp_path, untouched(0.6), {**untouched(0.4), "name": "stories", "sha256": OTHER})
    assert text.count("| untouched |") == 2
    assert "SmolLM2-135M-Instruct: 500 items" in text
    assert "stories: 500 items" in text


def test_without_a_file_the_tasks_are_not_run(tmp_path):
    assert section(tmp_path / ROWS) == "## Tasks\n\nnot run\n"
    assert line(page(tmp_path, made_up("dense-0.86-seed0", 0.5)), "untouched")[:2] == ["\u2014", "not run"]


def test_the_tables_are_on_the_page(tmp_path):
    rows = page(tmp_path, untouched(0.6))
    assert rows in retrofit_page.write(tmp_path, tmp_path / "RETROFIT.md").read_text()


def test_scores_of_another_run_make_no_row():
    found = {"method": "dense", "execution": "sparse", "budget": None, "tasks": {}, "env": {}}
    with pytest.raises(UserError) as error:
        task_row("span-0.7-seed0", config_of("span-0.7-seed0"), BASE, found)
    assert "span-0.7-seed0 is span, but the scores are those of dense" in one_line(error.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("base")
    return train(tiny(folder, DenseConfig(), n_layer=4, steps=4), folder / "untouched", show=False)


@pytest.fixture(scope="module")
def dropped(base) -> Run:
    to = base.path.with_name("drop-0.7-seed0")
    return td.retrofit(base, to, method="drop", budget=0.75, changes=STEPS, show=False)


def test_the_command(base, dropped, tmp_path, capsys, undrawn):
    write_tasks(tmp_path / "tasks", {"piqa": ITEMS, "lambada": [Item("one of them should", (" accidentally",))]})
    words = ["score", str(base.path), str(dropped.path), "--tasks", str(tmp_path / "tasks"), "--items", "4"]
    words += ["--results", str(tmp_path / "results"), "--device", "cpu"]
    main(words, PAPER)
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "docs" / "RETROFIT.md")
    rows = read_rows(tmp_path / "results" / ROWS)
    assert [row["name"] for row in rows] == ["untouched", "drop-0.7-seed0"]
    assert {row["sha256"] for row in rows} == {base.fingerprint}
    for run, row in zip((base, dropped), rows, strict=True):
        found = json.loads(json.dumps(score_run(run, tmp_path / "tasks", items=4, device="cpu")))
        assert row["tasks"] == found["tasks"]
        assert row["items"] == {"piqa": 4, "lambada": 1}
        assert row["config"] == to_dict(run.config)
        assert row["evaluated_on"]["device"] == found["env"]["device"]
        assert task_row(run.name, run.config, base_of(run), found) == row
    text = (tmp_path / "docs" / "RETROFIT.md").read_text()
    assert line(text, "blocks dropped")[-2] == "0.750"
    main(words, PAPER)
    assert len(read_rows(tmp_path / "results" / ROWS)) == 2, "the same runs on the same items"


def test_rows_are_written_one_by_one(base, dropped, tmp_path, monkeypatch):
    def first_only(run: Run, *args: Any, **how: Any) -> dict[str, Any]:
        if run.path == dropped.path:
            raise KeyboardInterrupt
        return score_run(run, *args, **how)

    monkeypatch.setattr(tasks, "score_run", first_only)
    write_tasks(tmp_path / "tasks", {"piqa": ITEMS})
    with pytest.raises(KeyboardInterrupt):
        score_runs((base.path, dropped.path), tmp_path / "tasks", tmp_path, device="cpu", show=False)
    assert [row["name"] for row in read_rows(tmp_path / ROWS)] == ["untouched"]


def test_a_mistake_is_told_before_anything_is_scored(base, dropped, tmp_path):
    misnamed, routed = tmp_path / "mine", tmp_path / "routed"
    shutil.copytree(dropped.path, misnamed)
    train(tiny(tmp_path, steps=2), routed, show=False)
    said = {
        (): "no run to score",
        (base.path, tmp_path / "nowhere"): "no such run folder",
        (base.path, misnamed): "such as span-0.7-seed0; rename its folder",
        (base.path, routed): "is neither dense nor a retrofit",
    }
    for runs, words in said.items():
        with pytest.raises(UserError) as error:
            score_runs(runs, tmp_path / "tasks", tmp_path, show=False)
        assert words in one_line(error.value)
    assert not (tmp_path / ROWS).exists()
