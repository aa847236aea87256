"""bench decode: it does not time wrong results, its rows are consistent, and its baseline is the dense model."""

import json
from dataclasses import replace

import pytest
import torch

from tests.tiny import tiny
from tokendepth.bench import decode
from tokendepth.bench.static_dense import StaticDense
from tokendepth.cache import KVCache
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DenseConfig, ModelConfig, RunConfig, SpanConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.methods import build
from tokendepth.runs.results import read_rows
from tokendepth.training.loop import train

MODEL = ModelConfig(32, 3, 4, 64, 16, 0.0, 11)
MODERN = replace(
    MODEL, norm="rms", positions="rotary", n_kv_head=2, attention_bias="qkv", qk_norm=True, ffn="swiglu", ffn_bias=False
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small shapes, few repeats, no compiler."""
    monkeypatch.setattr(decode, "SHAPES", {"paper": decode.Shape(MODEL, (12,), on_cpu=(1, 2))})
    monkeypatch.setattr(decode, "REPEATS", {"cpu": 2})
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_rows_add_up(tmp_path):
    rows = list(decode.measure("cpu", tmp_path, (0.0, 0.5, 1.0)))
    assert [(row["batch"], row["asked"]) for row in rows] == [(b, f) for b in (1, 2) for f in (0.0, 0.5, 1.0)]
    assert read_rows(tmp_path / "decode.json") == rows
    for row in rows:
        assert row["speedup"] == row["dense_ms"][0] / row["sparse_ms"][0]
        assert row["dense_ms"][0] == min(row["all_dense_ms"].values())
        assert row["tokens_per_s"] == 1000 * row["batch"] / row["sparse_ms"][0]
        assert row["ceiling"] == row["dense_bytes"] / row["bytes"]
        assert row["asked"] == pytest.approx(row["active_fraction"], abs=0.3)
    assert rows[0]["ceiling"] > rows[1]["ceiling"] > 1 > rows[2]["ceiling"], "routers cost"


def test_bytes_by_hand(tmp_path):
    """With no token active, only keys, values and routers of two routed blocks are read, but all of the first block."""
    (row,) = (row for row in decode.measure("cpu", tmp_path, (0.0,), (1,)))
    d, ff, keys, hidden = 32, 64, 12 * 2 * 32, 16
    block, router, head = 4 * d * d + 2 * d * ff, hidden * d + hidden, 11 * d
    assert row["dense_bytes"] == 4 * (3 * (block + keys) + head)
    assert row["bytes"] == 4 * (block + keys + 2 * (2 * d * d + router) + head)


def test_the_same_again_replaces_its_row(tmp_path):
    for _ in range(2):
        list(decode.measure("cpu", tmp_path, (0.5,), (1,)))
    assert len(read_rows(tmp_path / "decode.json")) == 1


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch):
    real = decode.decode_one

    def wrong(model, cache, tokens, execution, **options):
        found = real(model, cache, tokens, execution, **options)
        return replace(found, logits=found.logits * 1.01) if execution == "sparse" else found

    monkeypatch.setattr(decode, "decode_one", wrong)
    with pytest.raises(UserError, match="sparse differs from hard"):
        list(decode.measure("cpu", tmp_path, (0.5,)))
    assert not (tmp_path / "decode.json").exists()


@torch.no_grad()
def test_steps_after_a_padded_prompt_ask_nothing_of_the_device(monkeypatch):
    """During graph capture no value may be read from the device."""
    model = build(RunConfig(model=replace(MODEL, context=20))).eval()
    cache = KVCache(model.config, 2, 20, like=model.norm.weight, fixed=True)
    decode.prefill(model, cache, [[0] * (20 - decode.STEPS)] * 2, "sparse")  # padded to 16
    steps = decode._Steps(model, cache, torch.zeros(decode.STEPS, 2, dtype=torch.long), [None] * decode.STEPS)

    def asked(_):
        raise AssertionError("asked")

    monkeypatch.setattr(torch.Tensor, "__int__", asked)
    with pytest.raises(AssertionError, match="asked"):
        cache.needed(decode.STEPS + 1, None, 20)
    assert len(steps("sparse")) == decode.STEPS


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=["classic", "modern"])
@torch.no_grad()
def test_static_dense_is_the_dense_model(model):
    """With a cache that holds the text's own keys and values instead of noise."""
    built = build(RunConfig(model=model, method=DenseConfig())).eval()
    ids = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    static = StaticDense(built, 2, 9)
    found = []
    for column in range(9):
        static.at.fill_(column)
        found.append(static.step(ids[:, column]))
    torch.testing.assert_close(torch.stack(found, 1), built(ids).logits, rtol=1e-5, atol=1e-5)


def timed(run, tmp_path, capsys, *words: str) -> list[dict]:
    main(["bench", "decode", "--run", str(run.path), "--device", "cpu", "--out", str(tmp_path), "--json", *words])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "method", [TSAConfig(), BudgetConfig(), SpanConfig(), DenseConfig()], ids=lambda m: type(m).__name__
)
def test_a_run_decides_for_itself(tmp_path, capsys, method):
    run = train(tiny(tmp_path, method=method, steps=2, n_layer=4), tmp_path / "run", show=False)
    (row,) = timed(run, tmp_path, capsys, "--batches", "2")
    assert (row["positions"], row["run"], row["batch"], row["asked"]) == ("trained", run.name, 2, None)
    assert row["checkpoint"] == run.fingerprint
    assert 0 <= row["active_fraction"] <= 1
    with pytest.raises(SystemExit):
        timed(run, tmp_path, capsys, "--batches", "1000")
    assert "--batches asks for 1000 sequences" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--fractions", "0.5,1.2"],
        ["--batches", "0"],
        ["--shapes", "paper,huge"],
        ["--run", "/nowhere/at/all"],
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "decode", *words, "--device", "cpu", "--out", str(tmp_path)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words[1].split(",")[-1] in line
