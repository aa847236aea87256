"""A budget on unseen text, stored thresholds, and rejected budgets."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import one_line, tiny, write_corpus
from tokendepth import data
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, TSAConfig, override
from tokendepth.errors import UserError
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import batches, evaluate, load_model, measure
from tokendepth.recipes import recipe
from tokendepth.runs.files import MANIFEST, sealed, write_json, write_sealed
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

pytestmark = pytest.mark.xdist_group("calibrate")
CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """On random words: thresholds hold on unseen text of the same kind, and here all text is of one kind.

    The 60,000 characters of the validation split are about 10,000 words, enough to know a share to within 0.005.
    """
    folder = tmp_path_factory.mktemp("budget")
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghij", k=dice.randint(1, 9))) for _ in range(50)]
    corpus = write_corpus(folder, " ".join(dice.choices(words, k=100_000)))
    config = tiny(folder, method=BudgetConfig(), corpus=corpus, steps=60, batch_size=8, context=32, eval_every=60)
    return train(config, folder / "run", show=False)


@pytest.fixture(scope="module")
def tsa(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("tsa")
    return train(tiny(folder, method=TSAConfig(), steps=1), folder / "run", show=False)


def routed(figures: dict[str, Any]) -> list[float]:
    """The share in every routed block; the mean would hide blocks that miss the budget in opposite directions."""
    first, *shares = figures["active_fraction_per_site"]
    assert first == 1.0
    return shares


def test_the_budget_holds_on_unseen_text(run):
    found = evaluate(run, timing=False)
    assert found["budget"] == 0.4
    assert found["tokens"] > 50_000
    assert routed(found["hard"]) == pytest.approx([0.4] * 2, abs=0.01)
    assert found["sparse"]["loss"] == pytest.approx(found["hard"]["loss"], rel=1e-5)
    assert found["has_soft"] is False


@pytest.mark.parametrize("budget", [0.2, 0.7, 1.0])
def test_the_dial_sets_another(run, budget):
    found = evaluate(run, timing=False, budget=budget)
    assert found["budget"] == budget
    assert routed(found["hard"]) == pytest.approx([budget] * 2, abs=0.01)
    assert found["tlops_skipped"] == pytest.approx((1 - budget) * 2 / 3, abs=0.01), "two of three blocks are routed"


@pytest.mark.slow
def test_a_curve_holds_every_budget_and_costs_rise_with_it(run):
    curve = evaluate(run, timing=False, curve=True)["curve"]
    assert [point["budget"] for point in curve] == [0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    costs = [point["flops_per_token"] for point in curve]
    assert costs == sorted(costs)
    for point in curve:
        assert routed(point["sparse"]) == pytest.approx([point["budget"]] * 2, abs=0.01)


@pytest.mark.slow
def test_the_budget_holds_in_every_block_on_the_corpus_of_the_demo(tmp_path):
    """Its modules differ from each other, so validation text must have some of each, as training text has."""
    config = override(recipe("demo.budget"), {"train.steps": "40", "train.eval_every": "40"})
    run = train(config, tmp_path / "run", show=False)
    model, dataset = load_model(run, CPU), data.load(run.config.data)
    calibrate.calibrate(model, dataset, 0.2)
    for split in ("val", "test"):
        text = batches(dataset, split, run.config.model.context, CPU)
        found = measure(model, text, lambda ids: model(ids, execution="hard"))
        assert found.depth.per_site == pytest.approx([1.0] + [0.2] * 5, abs=0.01), split


@pytest.fixture(scope="module")
def stretches(tmp_path_factory) -> Run:
    """Random alternation of two alphabets every 500 characters, so that windows differ as much as possible."""
    folder, dice = tmp_path_factory.mktemp("stretches"), random.Random(0)
    text = "".join("".join(dice.choices(dice.choice(["abcd", "0123"]), k=500)) for _ in range(800))
    corpus = write_corpus(folder, text)
    config = tiny(folder, method=BudgetConfig(), corpus=corpus, steps=20, batch_size=8, context=32, eval_every=20)
    return train(config, folder / "run", show=False)


@pytest.mark.slow
def test_a_text_whose_windows_differ_is_looked_at_for_longer(stretches, run, monkeypatch):
    looked_at = []

    def counting(model, ids, budget, original=calibrate.calibrate_on):
        looked_at.append(len(ids))
        return original(model, ids, budget)

    monkeypatch.setattr(calibrate, "calibrate_on", counting)
    first = calibrate.FIRST_TOKENS // 32
    calibrate.calibrate(load_model(run, CPU), data.load(run.config.data), 0.4)
    alike = max(looked_at)  # random words
    looked_at.clear()
    model, dataset = load_model(stretches, CPU), data.load(stretches.config.data)
    calibrate.calibrate(model, dataset, 0.4, roughly=True)
    assert looked_at == [first]
    calibrate.calibrate(model, dataset, 0.4)
    assert looked_at[1] == first
    assert looked_at[2] > 2 * alike
    whole = measure(model, batches(dataset, "train", 32, CPU), lambda ids: model(ids, execution="hard"))
    assert whole.depth.active_fraction == pytest.approx(0.4, abs=0.01)


def test_blocks_that_differ_are_not_taken_for_alike_because_their_mean_is(run, monkeypatch):
    """One block takes more tokens as the other takes fewer, but the budget must hold for each."""
    looked_at = []

    def opposite(model, ids, budget):
        looked_at.append(len(ids))
        shares = 0.4 + 0.15 * torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
        return torch.stack([shares, 0.8 - shares])

    monkeypatch.setattr(calibrate, "calibrate_on", opposite)
    calibrate.calibrate(load_model(run, CPU), data.load(run.config.data), 0.4)
    assert looked_at[1:] == [pytest.approx((0.15 / calibrate.WANTED_ERROR) ** 2, rel=0.1)]


def test_kept_thresholds_are_used_and_need_no_corpus(run, capsys):
    main(["calibrate", str(run.path), "--budget", "0.6"])
    assert "--budget 0.6" in capsys.readouterr().out
    model, fresh = load_model(run, CPU), load_model(run, CPU)
    before = model.method.thresholds
    calibrate.calibrate(fresh, data.load(run.config.data), 0.6)
    corpus = Path(run.config.data.corpus.removeprefix("text:"))
    away = corpus.rename(corpus.with_suffix(".away"))
    try:
        calibrate.set_budget(model, run, 0.6)
        assert model.method.thresholds == fresh.method.thresholds != before
        main(["generate", str(run.path), "--budget", "0.6", "--prompt", "a", "--tokens", "2"])
        with pytest.raises(UserError, match=str(corpus)):
            calibrate.set_budget(model, run, 0.55)
    finally:
        away.rename(corpus)
        (run.path / "calibration.json").unlink()


def test_thresholds_have_not_seen_evaluation_text(run, monkeypatch):
    """The thresholds do not depend on what follows the training split."""
    dataset = data.load(run.config.data)
    seen = np.array(dataset.ids)
    seen[dataset.ends[0] :] = 0
    model = load_model(run, CPU)
    calibrate.calibrate(model, dataset, 0.5)
    expected = model.method.thresholds
    object.__setattr__(dataset, "ids", seen)
    calibrate.calibrate(model, dataset, 0.5)
    assert model.method.thresholds == expected


def test_a_damaged_calibration_is_named(run):
    path = run.path / "calibration.json"
    for text in ('{"version": 1, "thresholds": {"0.6": [1.0]}}', '{"version": 2}', "[]"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"calibration\.json is damaged") as error:
            evaluate(run, timing=False, budget=0.6)
        one_line(error.value)
    path.unlink()


@pytest.fixture
def kept(run) -> Iterator[Path]:
    """A calibration.json with the thresholds for two budgets."""
    model, path = load_model(run, CPU), run.path / "calibration.json"
    for budget, shift in ((0.6, 0.0), (0.3, 1.5)):
        model.method.set_thresholds([value + shift for value in model.method.thresholds])
        calibrate.keep(model, run, budget)
    yield path
    path.unlink()


def test_no_flipped_bit_is_read_as_another_threshold(run, kept):
    """RELIABILITY 23."""
    content, dice, model = kept.read_bytes(), random.Random(0), load_model(run, CPU)
    calibrate.set_budget(model, run, 0.6)
    right = model.method.thresholds
    for _ in range(1000):
        flipped, place = bytearray(content), dice.randrange(8 * len(content))
        flipped[place // 8] ^= 1 << place % 8
        kept.write_bytes(flipped)
        with pytest.raises(UserError):
            calibrate.set_budget(model, run, 0.6)
    assert model.method.thresholds == right


def test_thresholds_that_lost_their_seal_do_not_pass_for_old_ones(run, kept):
    tree = json.loads(kept.read_text())
    del tree["sha256"]
    for version in (1, 2):
        write_json(kept, {**tree, "version": version})
        with pytest.raises(UserError, match=r"calibration\.json is damaged") as raised:
            calibrate.set_budget(load_model(run, CPU), run, 0.6)
        assert f"tokendepth calibrate {run.path} --budget" in one_line(raised.value)


@pytest.mark.parametrize("thresholds", [None, [], {"0.6": 3}, {"0.6": []}, {"0.6": ["x", 1.0]}, {"0.6": [10**400, 1]}])
def test_thresholds_that_are_none_are_refused_under_a_right_seal(run, kept, thresholds):
    write_sealed(kept, {"version": calibrate.VERSION, "thresholds": thresholds})
    with pytest.raises(UserError, match=r"calibration\.json is damaged: no 2 thresholds") as raised:
        calibrate.set_budget(load_model(run, CPU), run, 0.6)
    one_line(raised.value)


def test_old_thresholds_without_a_seal_are_read(tmp_path):
    run = Run(Path(shutil.copytree(GOLDEN / "manifest-2" / "calibrated", tmp_path / "run")))
    model, path = load_model(run, CPU), run.path / "calibration.json"
    calibrate.set_budget(model, run, 0.75)
    right, kept = model.method.thresholds, json.loads(path.read_text())["thresholds"]
    manifest = json.loads((run.path / MANIFEST).read_text())
    del manifest["sha256"]
    (run.path / MANIFEST).write_bytes(sealed({**manifest, "version": 1}))  # as before there were seals
    write_json(path, {"version": 1, "thresholds": kept})
    model = load_model(run, CPU)
    calibrate.set_budget(model, run, 0.75)
    assert model.method.thresholds == right
    path.write_text(path.read_text().replace(str(kept["0.75"][0]), "NaN"))
    with pytest.raises(UserError, match=r"calibration\.json is damaged"):
        calibrate.set_budget(model, run, 0.75)


@pytest.mark.parametrize("value", ["0", "1.2", "nan", "-0.5", "much"])
@pytest.mark.parametrize("command", [["calibrate"], ["evaluate", "--no-timing"], ["generate", "--tokens", "2"]])
def test_a_bad_budget_is_refused_in_one_line(run, capsys, command, value):
    with pytest.raises(SystemExit) as stop:
        main([command[0], str(run.path), *command[1:], "--budget", value])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "budget" in lines[0]
    assert value in lines[0]


@pytest.mark.parametrize("value", ["0", "1.2", "nan", "much"])
def test_a_bad_budget_is_refused_before_training(capsys, value, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["train", "demo.budget", "--method.budget", value, "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "method.budget" in line
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_budget_is_told_so(tsa, capsys):
    for words in (["calibrate", str(tsa.path), "--budget", "0.5"], ["evaluate", str(tsa.path), "--curve"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "has no budget to set, as its method tsa decides" in line
