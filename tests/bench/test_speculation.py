"""The benchmark of self-speculation: rates, costs and predicted speedup are consistent; its command and row."""

import json

import pytest
import torch

from tests.shown import every_update
from tests.tiny import TEXT, tiny, write_corpus
from tokendepth.bench import speculation
from tokendepth.bench.speculation import in_words, passages, speculative_timing
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DenseConfig, EarlyExitConfig
from tokendepth.data.of_run import dataset_of, tokenizer_of
from tokendepth.infer.drafting import Pace, speedup
from tokendepth.infer.speculation import SpeculativeEngine
from tokendepth.runs.results import read_rows
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


@pytest.fixture(autouse=True)
def _drafts(monkeypatch):
    """Pace by weights: measured times would not let such small models draft."""
    monkeypatch.setattr(
        SpeculativeEngine, "take_pace", lambda self, show: setattr(self, "pace", Pace(1.0, ((1, 1.25),)))
    )


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_what_is_told_of_speculation(tmp_path, temperature):
    run = train(tiny(tmp_path, BudgetConfig(budget=0.5), steps=1, n_layer=4), tmp_path / "run", show=False)
    row = speculative_timing(
        run, ["green", "on the "], tokens=8, share=0.0, budget=1.0, temperature=temperature, repeats=1, device="cpu"
    )
    assert row["tokens"] == 16
    assert 0 <= row["acceptance"] <= 1
    assert 0 < row["draft_cost_by_weights"] < 1 == row["verify_cost_by_weights"]
    assert min(*row["plain_tokens_per_s"], *row["speculation_tokens_per_s"], *row["speedup"]) > 0
    costs = row["draft_cost_by_weights"], row["verify_cost_by_weights"]
    assert row["formula_by_weights"] == pytest.approx(speedup(row["acceptance"], row["draft_length"], *costs))
    costs = row["draft_ms"] / row["plain_step_ms"], row["verify_ms"] / row["plain_step_ms"]
    assert row["formula_by_time"] == pytest.approx(speedup(row["acceptance"], row["draft_length"], *costs))
    assert row["tokens_that_differ"] == row["unexplained"] == 0
    assert {"device", "torch", "commit"} <= set(row)
    assert row["pace"] == {"draft": 1.0, "verify": ((1, 1.25),), "works": None}


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("exits")
    return train(tiny(folder, EarlyExitConfig(), steps=1, n_layer=4, context=24), folder / "run", show=False)


def bench(run: Run, out, *words: str) -> None:
    main(["bench", "speculation", "--run", str(run.path), "--device", "cpu", "--out", str(out), *words])


def test_the_row_of_a_run(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speculation, "PASSAGES", 2)
    log = every_update(monkeypatch)
    for _ in range(2):
        bench(run, tmp_path, "--json")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert read_rows(tmp_path / "speculation.json") == rows[1:], "the same again replaces its row"
    row = rows[1]
    assert (row["run"], row["checkpoint"], row["method"]) == ("run", run.fingerprint, "early_exit")
    assert (row["dtype"], row["temperature"], row["budget"], row["share"]) == ("float32", 0.0, None, None)
    assert (row["prompts"], row["prompt_tokens"], row["tokens"]) == (2, 8, 2 * 16), "a third of the context is read"
    assert row["drafted"] > 0 == row["tokens_that_differ"]
    assert str(run.path.parent) not in json.dumps(row), "a row holds no path"
    log.check_told("timing plain decoding and speculation", "rounds")


def test_in_words(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speculation, "PASSAGES", 1)
    bench(run, tmp_path)
    (row,) = read_rows(tmp_path / "speculation.json")
    (said,) = capsys.readouterr().out.splitlines()
    assert said == in_words(row)
    told = {**row, "dtype": "bfloat16", "device": "abacus", "speedup": [1.5, 1.4, 1.6], "drafted": 9, "tokens": 1024}
    told |= {"plain_tokens_per_s": [20.0] * 3, "speculation_tokens_per_s": [30.0] * 3, "acceptance": 0.9}
    told |= {"draft_length": 4.0, "plain_step_ms": 50.0, "draft_ms": 10.0, "verify_ms": 60.0, "unexplained": 1}
    told |= {"draft_cost_by_weights": 0.25, "verify_cost_by_weights": 1.0, "formula_by_time": 2.05}
    assert in_words({**told, "formula_by_weights": 2.35, "tokens_that_differ": 3}) == (
        "run on abacus in bfloat16: 1.50x (1.40 to 1.60), from 20.0 to 30.0 tokens/s; acceptance 0.900, 4.0 tokens per "
        "draft; cost in plain steps: 0.20 per drafted token by time (0.25 by weights), 1.20 per verification (1.00); "
        "predicted speedup 2.05x by time, 2.35x by weights; 3 of 1024 tokens differ, 1 unexplained"
    )
    assert in_words({**told, "drafted": 0}).endswith("30.0 tokens/s; nothing was drafted")


def test_passages_are_of_the_test_text(run):
    dataset, tokenizer = dataset_of(run), tokenizer_of(run)
    found = [tokenizer.decode(passage) for passage in passages(dataset, 24)]
    assert len(found) == speculation.PASSAGES
    test = TEXT[TEXT.index(found[0], len(TEXT) * 9 // 10) :]
    assert found == [test[24 * n : 24 * n + 8] for n in range(len(found))]
    short = passages(dataset, 256)
    assert [len(passage) for passage in short] == [64] * (len(test) // 192), "as many as there are"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_the_precision_is_the_devices(run, tmp_path, monkeypatch, device, dtype):
    asked = []
    monkeypatch.setattr(speculation, "choose_device", torch.device)
    monkeypatch.setattr(speculation, "speculative_timing", lambda *_, **options: asked.append(options["dtype"]) or {})
    speculation.measure(run.path, device, tmp_path)
    assert asked == [dtype]


def test_another_text(run, tmp_path, monkeypatch):
    asked = []
    real = speculation.speculative_timing
    monkeypatch.setattr(speculation, "PASSAGES", 1)
    monkeypatch.setattr(speculation, "speculative_timing", lambda *a, **k: asked.append(a[1]) or real(*a, **k))
    bench(run, tmp_path, "--corpus", write_corpus(tmp_path / "other", "all the bottles fall " * 40))
    ((passage,),) = asked
    assert tokenizer_of(run).decode(passage) in "all the bottles fall " * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "bench speculation needs a trained run; name one with --run RUN"),
        (["--run", "/nowhere/at/all"], "/nowhere/at/all: no such run folder"),
        (["--run", "{dense}"], "is of method dense, which has no cheaper pass to draft with"),
        (["--run", "{short}"], "has a context of 2; expected 3 or more, for a token to read and two to write"),
    ],
)
def test_a_mistake_is_one_line(words, said, tmp_path, capsys):
    folders = {}
    for name, config in {
        "dense": tiny(tmp_path, DenseConfig(), steps=1),
        "short": tiny(tmp_path, EarlyExitConfig(), steps=1, context=2),
    }.items():
        if f"{{{name}}}" in words:
            folders[name] = train(config, tmp_path / name, show=False).path
    with pytest.raises(SystemExit) as stop:
        main(["bench", "speculation", "--device", "cpu", *(word.format(**folders) for word in words)])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
