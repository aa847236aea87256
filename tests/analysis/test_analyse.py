"""`tokendepth analyse` end to end: numbers that a plain loop finds, the folder it writes, every method, mistakes."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tokendepth as td
from tests.tiny import TEXT, tiny, write_corpus
from tokendepth.analysis.study import analyse
from tokendepth.cli.main import main
from tokendepth.config import METHOD_CONFIGS, BudgetConfig, DataConfig, DenseConfig, RunConfig
from tokendepth.data import load
from tokendepth.measure.evaluate import load_model
from tokendepth.methods import METHODS
from tokendepth.report import analysis_figures
from tokendepth.report.analysis import write_analysis
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

ROUTED = [name for name in METHODS if name != "dense"]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[Run]:
    folder = tmp_path_factory.mktemp("seeds")
    method = BudgetConfig(budget=0.5)
    return [
        train(tiny(folder, method=method, steps=8, seed=seed), folder / f"seed{seed}", show=False) for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def tree(seeds) -> dict:
    return analyse(seeds, device="cpu")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("dense")
    config = tiny(folder, DenseConfig(), n_layer=4, steps=2, corpus=write_corpus(folder, TEXT * 4), tokens="bpe:300")
    return train(config, folder / "run", show=False)


def test_the_tables_are_those_of_a_plain_loop(seeds, tree):
    run, found = seeds[0], tree["runs"][0]
    model, dataset = load_model(run, torch.device("cpu")), load(run.config.data)
    works, own, full, spaces = [], [], [], []
    for inputs, targets in dataset.windows("val", run.config.model.context, 1):
        ids, wanted = torch.from_numpy(inputs), torch.from_numpy(targets)[0]
        out = model(ids, execution="hard")
        works.append(out.trace.work[[n for n, site in enumerate(out.trace.sites) if site.routed], 0])
        own.append(F.cross_entropy(out.logits[0], wanted, reduction="none"))
        everyone = torch.ones(len(works[-1]), *ids.shape, dtype=torch.bool)
        full.append(
            F.cross_entropy(model(ids, execution="hard", decisions=everyone).logits[0], wanted, reduction="none")
        )
        spaces += [dataset.tokenizer.decode([i]) == " " for i in inputs[0]]
    work, own, full, space = torch.cat(works, 1), torch.cat(own), torch.cat(full), torch.tensor(spaces)
    assert found["tokens"] == work.shape[1]
    assert found["windows"] == len(works)
    assert found["loss"]["value"] == pytest.approx(own.mean().item(), abs=1e-5)
    assert found["depth"]["value"] == pytest.approx(work.mean().item(), abs=1e-6)
    (group,) = [row for row in found["by"]["kind"]["groups"] if row["group"] == "space"]
    assert [site["value"] for site in group["per_site"]] == pytest.approx(work[:, space].mean(1).tolist(), abs=1e-6)
    (row,) = [row for row in found["skipped"] if row["kind"] == "space"]
    passed = space & (work.min(0).values < 0.5)
    assert row["loss"]["value"] == pytest.approx((own - full)[space].mean().item(), abs=1e-5)
    assert row["loss_where_skipped"]["value"] == pytest.approx((own - full)[passed].mean().item(), abs=1e-5)


def test_seeds_are_compared_token_by_token(seeds, tree):
    one, other = (load_model(run, torch.device("cpu")) for run in seeds)
    alike = []
    for inputs, _ in load(seeds[0].config.data).windows("val", 16, 1):
        a, b = (model(torch.from_numpy(inputs), execution="hard").trace for model in (one, other))
        routed = [n for n, site in enumerate(a.sites) if site.routed]
        alike.append((a.work == b.work)[routed, 0])
    (pair,) = tree["agreement"]
    assert pair["seeds"] == [0, 1]
    expected = torch.cat(alike, 1).float().mean(1).tolist()
    assert [site["agree"]["value"] for site in pair["per_site"]] == pytest.approx(expected)


def test_it_is_the_same_when_repeated_and_fits_json(seeds, tree):
    assert analyse(seeds, device="cpu") == tree
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree


def test_the_command_writes_a_folder_and_prints_the_summary(seeds, tree, tmp_path, capsys):
    out = tmp_path / "out"
    main(["analyse", *(str(run.path) for run in seeds), "--out", str(out), "--device", "cpu"])
    printed = " ".join(capsys.readouterr().out.split())
    assert {path.name for path in out.iterdir()} == {"analysis.html", "analysis.md", "analysis.json", "figures"}
    names = [f"analysis_{name}" for name in ("kinds", "numbers", "skipped", "stability")]
    assert sorted(path.name for path in (out / "figures").glob("*.svg")) == [f"{name}.svg" for name in names]
    html, text = ((out / f"analysis.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    assert json.loads((out / "analysis.json").read_text()) == tree
    for sentence in tree["summary"]:
        assert sentence in printed
    assert html.count("<svg") == 4
    assert not re.search(r'(?:src|href)="(?!#|data:)', html)
    for title in ("Depth by kind of token", "Is it a lookup table?", "Do seeds agree?", "What skipping costs"):
        assert title in html
        assert f"## {title}" in text


def test_a_name_with_markup_is_text(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(analysis_figures, "figures", lambda tree: [])  # drawing takes seconds
    hostile = {**tree, "corpus": "<script>alert(1)</script>", "summary": ["<b>| $x$"]}
    page = write_analysis(hostile, tmp_path / "out")
    assert "<script>alert" not in page.read_text(encoding="utf-8")
    assert "- &lt;b&gt;\\| \\$x\\$" in (tmp_path / "out" / "analysis.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_every_method_is_analysed_through_its_trace(name, tmp_path):
    run = train(tiny(tmp_path, method=METHOD_CONFIGS[name](), steps=1, n_layer=4), tmp_path / "run", show=False)
    (found,) = analyse([run], device="cpu")["runs"]
    assert 0 <= found["depth"]["value"] <= 1
    assert len(found["sites"]) == len(found["lookup"]) == len(found["depth_per_site"])
    assert sum(row["share"] for row in found["by"]["kind"]["groups"]) == pytest.approx(1)


@pytest.mark.slow
def test_a_retrofitted_model_with_longer_tokens(dense, tmp_path):
    changes = {"train.steps": 2, "train.batch_size": 4, "train.device": "cpu"}
    run = td.retrofit(dense, tmp_path / "run", budget=0.8, changes=changes, show=False)
    tree = analyse([run], device="cpu")
    kinds = {row["group"] for row in tree["runs"][0]["by"]["kind"]["groups"]}
    assert {"begins a word", "continues a word"} <= kinds
    assert tree["runs"][0]["token"] == "token"
    assert "After one token is replaced" in " ".join(tree["summary"])


def refused(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["analyse", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    lines = [line for line in captured.err.splitlines() if line.startswith("tokendepth: ")]
    assert len(lines) == 1, captured.err
    return lines[0]


def test_mistakes_are_answered_in_one_line(seeds, dense, tmp_path, capsys):
    run = seeds[0].path
    synthetic = tiny(tmp_path, steps=1, context=48)
    copy = RunConfig(DataConfig("copy"), synthetic.model, synthetic.method, synthetic.train)
    copied = train(copy, tmp_path / "copy", show=False).path
    begun = Run.create(tmp_path / "begun", seeds[0].config, resume=False).path
    config = seeds[0].config
    other = train(replace(config, train=replace(config.train, steps=3)), tmp_path / "other", show=False).path
    (tmp_path / "file").write_text("")
    for arguments, said in {
        (): "no run folder",
        (tmp_path / "none",): "no such run folder",
        (dense.path,): "no routers, so every token has the same depth; use a routed run",
        (copied,): "trained on copy, which is not text",
        (begun,): "is not finished",
        (run, other): "differs from .* in more than the seed: its train.steps is 3, not 8; analyse them one at a time",
        (run, run): "has the same seed as .*, 0; name each seed once",
        (run, "--tokens", 100): "100 tokens of the val split are too few; expected at least 20 windows of 16 tokens",
        (run, "--tokens", 0): "tokens is 0; expected at least 1",
        (run, "--corpus", "text:gone.txt"): "gone.txt",
        (run, "--out", tmp_path / "file"): "is a file; expected a folder",
    }.items():
        assert re.search(said, refused(capsys, *arguments)), said


def test_another_text_and_its_beginning(seeds, tmp_path):
    corpus = write_corpus(tmp_path, TEXT * 3)
    found = analyse(seeds[:1], corpus=corpus, split="test", tokens=400, device="cpu")
    assert (found["corpus"], found["split"]) == (corpus, "test")
    alone = analyse(str(seeds[0].path), corpus=corpus, split="test", tokens=400, device="cpu")
    assert alone["runs"] == found["runs"], "one run needs no list"
    assert 400 <= found["runs"][0]["tokens"] < 450
    assert np.isfinite(found["runs"][0]["loss"]["value"])
