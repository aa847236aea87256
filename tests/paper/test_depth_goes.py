"""docs/WHERE_DEPTH_GOES.md: a finding holds in every seed of every model, and what is missing is not run."""

from pathlib import Path

import pytest

from paper.depth_goes import MODELS, QUESTIONS, SEEDS, add, document, kept, write
from tests.analysis.made_up import estimate, quiet
from tests.tiny import tiny
from tokendepth.config import BudgetConfig
from tokendepth.runs.results import read_rows
from tokendepth.training.loop import train


def row(name: str, entropy: tuple[float, float, float] = (0.2, 0.1, 0.3), seeds: int = SEEDS) -> dict:
    runs = [quiet(seed) | {"sites": []} for seed in range(seeds)]
    for run in runs:
        run["by"]["entropy of the prediction"]["rank_correlation"] = estimate(*entropy)
        run["lookup"] = []  # no router whose decision varies
    about = {"method": "budget", "split": "test", "corpus": name, "context": 16, "config": {}}
    return {"name": name, "runs": runs, "agreement": [], **about}


CLAIM = "- tokens whose prediction is less certain get more depth"


def test_a_finding_holds_in_every_seed_of_every_model_or_is_none():
    assert CLAIM in document([row(name) for name in MODELS])
    for other in ((0.2, -0.1, 0.3), (-0.2, -0.3, -0.1)):
        text = document([row("shakespeare"), row("enwik8"), row("retrofitted", other)])
        assert CLAIM not in text
        assert "- none of the statements below" in text
    less = document([row(name, (-0.2, -0.3, -0.1)) for name in MODELS])
    assert CLAIM.replace("more", "less") in less


def test_what_one_model_does_not_show_is_no_finding():
    rows = [row(name) for name in MODELS]
    for one in rows[:-1]:
        one["agreement"] = [{"per_site": [{"kappa": estimate(0.5, 0.4, 0.6)}]}]
    text = document(rows)
    assert "| seeds agree more than by chance | 0.50 (0.40 to 0.60) * | 0.50 (0.40 to 0.60) * | \u2014 |" in text
    assert "- seeds agree" not in text


def test_differences_hold_whatever_their_parts_have_in_common():
    rows = [row(name) for name in MODELS]
    for run in (run for one in rows for run in one["runs"]):
        near, far = run["stability"]
        near["flips"], far["flips"] = estimate(0.3, 0.2, 0.4), estimate(0.1, 0.05, 0.15)
    claim = "replacing a token changes the decision for the next one more often than for the most distant one"
    assert f"- {claim}\n" in document(rows)
    assert f"| {claim} | +20.0% * |" in document(rows)
    rows[0]["runs"][1]["stability"][1]["flips"] = estimate(0.1, 0.0, 0.21)  # may be more than the nearest has
    assert f"- {claim}\n" not in document(rows)


@pytest.mark.parametrize("rows", [[], [row("enwik8")], [row(name, seeds=2) for name in MODELS]])
def test_fewer_models_or_seeds_make_no_finding(rows):
    text = document(rows)
    assert "In every seed of every model: not run" in text
    assert CLAIM not in text
    missing = len(MODELS) - len(rows)
    assert text.count("\nnot run\n") == missing


def test_a_row_keeps_what_the_page_needs():
    tree = {"a": 0.123456789, "groups": [{"mean": 1.0, "per_site": [1], "depth": 2}, {"per_site": [3], "n": 4}]}
    assert kept(tree) == {"a": 0.123457, "groups": [{"mean": 1.0, "depth": 2}, {"per_site": [3], "n": 4}]}


@pytest.mark.slow
def test_runs_become_a_row_and_a_page(tmp_path):
    config = tiny(tmp_path, method=BudgetConfig(), steps=2)
    run = train(config, tmp_path / "run", show=False).path
    for _ in range(2):
        add("enwik8", [run], tmp_path / "results", split="val", device="cpu")
    (made,) = read_rows(tmp_path / "results" / "analysis.json")
    assert made["name"] == "enwik8"
    text = write(tmp_path / "results", tmp_path / "docs" / "PAGE.md").read_text()
    assert all(sentence in " ".join(text.split()) for sentence in made["summary"])
    assert "1 of 3 seeds: it is not known whether anything here holds for other seeds." in text
    assert len(QUESTIONS) == sum(line.startswith("| ") for line in text.splitlines()) - 2


def test_the_page_is_that_of_the_rows(tmp_path):
    root = Path(__file__).resolve().parents[2]
    made = write(root / "results", tmp_path / "PAGE.md").read_text()
    assert (root / "docs" / "WHERE_DEPTH_GOES.md").read_text() == made, "stale: make readme"
