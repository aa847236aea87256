"""Evaluation: every target once, deterministic, in every execution mode, and equal to a plain loop."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import TEXT, edit_json, hashes, one_line, tiny, write_corpus
from tokendepth.config import (
    HALTING_THRESHOLDS,
    PAPER_THRESHOLDS,
    BudgetConfig,
    DenseConfig,
    EarlyExitConfig,
    TSAConfig,
)
from tokendepth.data import load
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import evaluate, has_curve, load_model, measure
from tokendepth.runs.run import Run
from tokendepth.trace import EXECUTIONS
from tokendepth.training.loop import train

CPU = torch.device("cpu")
# Means over the same float32 logits, summed in another order or computed with another batch size.
ROUNDING = 1e-6


def trained(folder: Path, **changes) -> Run:
    return train(tiny(folder, **changes), folder / "run", show=False)


@pytest.fixture(scope="module")
def tsa(tmp_path_factory) -> Run:
    """Trained until its routers skip some but not all of the work; other tests rely on that."""
    run = trained(tmp_path_factory.mktemp("tsa"), method=TSAConfig(depth_penalty=0.005), steps=100, batch_size=8)
    assert 0.1 < evaluate(run, timing=False)["sparse"]["active_fraction"] < 0.9
    return run


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Run:
    return trained(tmp_path_factory.mktemp("dense"), method=DenseConfig(), steps=20)


@pytest.fixture(scope="module")
def figures(tsa) -> dict:
    return evaluate(tsa, timing=False)


def by_hand(run: Run, split: str, execution: str, *, of_bytes: bool = False) -> tuple[float, int]:
    """The mean loss over all targets of the split and their number, computed one window and one target at a time."""
    model, context = load_model(run, CPU), run.config.model.context
    corpus = Path(run.config.data.corpus.removeprefix("text:"))
    if of_bytes:
        ids = list(corpus.read_bytes())
    else:
        text = corpus.read_text(encoding="utf-8")
        vocabulary = sorted(set(text))
        ids = [vocabulary.index(char) for char in text]
    first, second = len(ids) * 8 // 10, len(ids) * 9 // 10
    ids = ids[first:second] if split == "val" else ids[second:]
    losses = []
    for start in range(0, len(ids) - 1, context):
        window, targets = ids[start : start + context], ids[start + 1 : start + context + 1]
        with torch.no_grad():
            logits = model(torch.tensor([window[: len(targets)]]), execution=execution).logits[0]
        losses += [-float(row.double().log_softmax(-1)[target]) for row, target in zip(logits, targets, strict=True)]
    assert len(losses) == len(ids) - 1
    return sum(losses) / len(losses), len(losses)


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_everything_is_there(tsa):
    found = evaluate(tsa)
    assert found.keys() == {
        "version", "method", "recipe", "corpus", "seed", "split", "tokens", "parameters", "router_parameters",
        "soft", "hard", "sparse", "routed", "tlops_saved_soft", "tlops_skipped", "flops_skipped", "flops_per_token",
        "flops_per_token_dense", "decision_flips", "controls", "time", "passage", "env", "has_soft", "curve",
    }  # fmt: skip
    for execution in EXECUTIONS:
        assert found[execution].keys() >= {"loss", "active_fraction", "active_fraction_per_site"}
    assert found["method"] == "tsa"
    assert found["split"] == "val"
    weights = tsa.weights()
    assert found["parameters"] == sum(array.size for array in weights.values())
    assert found["router_parameters"] == sum(array.size for name, array in weights.items() if "router" in name)
    assert found["router_parameters"] == 2 * (32 * 16 + 16 + 16 + 1)
    timed = found["time"]
    for name in ("dense_ms", "hard_ms", "sparse_ms"):
        median, lower, upper = timed[name]
        assert 0 < lower <= median <= upper
    assert timed["speedup"] == timed["dense_ms"][0] / timed["sparse_ms"][0]
    assert (timed["batch"], timed["context"]) == (8, 16)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_asking_twice_gives_the_same_and_changes_no_run(tsa, figures):
    before = hashes(tsa.path)
    torch.rand(3)  # the controls use their own random generator
    assert evaluate(tsa, timing=False) == figures
    timed = evaluate(tsa)
    assert {**timed, "time": None} == figures
    assert hashes(tsa.path) == before


def test_the_run_keeps_what_is_written_into_it(tsa, figures, tmp_path):
    run = Run.create(tmp_path / "run", tsa.config, resume=False)
    run.write_evaluation(figures)
    assert run.evaluation == figures


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_loss_is_the_mean_over_every_target(tsa, execution, split):
    found = evaluate(tsa, split=split, timing=False)
    loss, targets = by_hand(tsa, split, execution)
    assert found["split"] == split
    assert found["tokens"] == targets
    assert found[execution]["loss"] == pytest.approx(loss, rel=ROUNDING)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_the_batch_size_does_not_matter(tsa, figures, execution, batch_size):
    model, dataset = load_model(tsa, CPU), load(tsa.config.data)
    stream = (
        (torch.from_numpy(inputs), torch.from_numpy(targets))
        for inputs, targets in dataset.windows("val", 16, batch_size)
    )
    measured = measure(model, stream, lambda ids: model(ids, execution=execution))
    assert measured.loss == pytest.approx(figures[execution]["loss"], rel=ROUNDING)
    assert measured.depth.active_fraction == pytest.approx(figures[execution]["active_fraction"], rel=ROUNDING)
    assert measured.depth.tokens == figures["tokens"]


@pytest.mark.parametrize("masked", [False, True])
def test_the_losses_are_summed_exactly(dense, masked):
    """A float32 sum over the 16,384 targets of one batch has an error of 1e-6, which depends on the batch size."""
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1024, 16, 32, generator=random)
    targets = torch.randint(0, 32, (1024, 16), generator=random)
    if masked:
        targets[:, :8] = -100
    model = load_model(dense, CPU)
    out = replace(model(torch.zeros(1, 16, dtype=torch.long)), logits=logits)
    measured = measure(model, iter([(targets.clamp(min=0), targets)]), lambda ids: out)
    exact = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()
    assert measured.loss == pytest.approx(exact, rel=1e-8)


def test_measuring_takes_the_model_as_it_is_evaluated_and_leaves_its_mode(tmp_path):
    run = trained(tmp_path, dropout=0.5, steps=2)
    model = load_model(run, CPU)
    assert not model.training
    dataset = load(run.config.data)

    def loss() -> float:
        windows = dataset.windows("val", 16, 8)
        return measure(model, ((torch.from_numpy(i), torch.from_numpy(t)) for i, t in windows), model).loss

    expected = loss()
    model.train()
    assert loss() == loss() == expected
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hard_and_sparse_are_equal_to_rounding_and_soft_is_not(figures):
    assert figures["decision_flips"] == 0
    assert figures["hard"]["loss"] == pytest.approx(figures["sparse"]["loss"], rel=ROUNDING)
    assert figures["hard"]["active_fraction"] == figures["sparse"]["active_fraction"]
    assert figures["hard"]["active_fraction_per_site"] == figures["sparse"]["active_fraction_per_site"]
    assert abs(figures["soft"]["loss"] - figures["hard"]["loss"]) > 1e-4


@pytest.mark.parametrize(("tokens", "size"), [("char", len(TEXT)), ("byte", len(TEXT.encode()))])
def test_bits_are_nats_by_the_unit_that_they_are_named_after(tmp_path, tokens, size):
    assert len(TEXT) < len(TEXT.encode())
    run = trained(tmp_path, tokens=tokens, steps=3)
    found = evaluate(run, timing=False)
    assert found["tokens"] == size * 9 // 10 - size * 8 // 10 - 1
    text = TEXT[size * 8 // 10 : size * 9 // 10]
    for execution in EXECUTIONS:
        loss, _ = by_hand(run, "val", execution, of_bytes=tokens == "byte")
        assert found[execution]["loss"] == pytest.approx(loss, rel=ROUNDING)
        bits = found[execution]["loss"] / math.log(2)
        if tokens == "char":
            assert found[execution]["bits_per_character"] == bits
            assert found[execution]["bits_per_byte"] == pytest.approx(bits * len(text) / len(text.encode()), rel=1e-12)
            assert found[execution]["bits_per_byte"] < bits
        else:
            assert found[execution]["bits_per_byte"] == bits
            assert found[execution]["bits_per_character"] is None


# --- depth ------------------------------------------------------------------------------------------------------------


def test_what_is_saved_follows_from_the_active_fractions(figures):
    """Eq. 6 and 7 with three layers; the stem is always active."""
    for execution in EXECUTIONS:
        stem, *routed = figures[execution]["active_fraction_per_site"]
        assert stem == 1.0
        assert figures[execution]["active_fraction"] == pytest.approx(sum(routed) / 2, rel=1e-12)
    for name, execution in (("tlops_saved_soft", "soft"), ("tlops_skipped", "sparse")):
        alpha = figures[execution]["active_fraction"]
        assert figures[name] == pytest.approx(1 - (1 + 2 * alpha) / 3, rel=1e-12)


def test_flops_are_counted_by_hand(figures):
    """2 x multiply-adds: keys and values, routers and head for all tokens, the rest of a block for active ones."""
    tokens = figures["tokens"]
    full, rest = divmod(tokens, 16)
    keys = (full * 16 * 16 + rest * rest) / tokens  # rows of the last, shorter window are shorter
    kv, others = 2 * 2 * 32 * 32, 2 * (2 * 32 * 32 + 2 * 32 * 64) + 4 * keys * 32
    head, router = 2 * 32 * len(set(TEXT)), 2 * (32 * 16 + 16)
    assert figures["flops_per_token_dense"] == pytest.approx(3 * (kv + others) + head, rel=1e-12)
    # The active tokens of the last window are not known here, so its shorter rows only give a bound.
    active = sum(figures["sparse"]["active_fraction_per_site"])
    executed = 3 * kv + 2 * router + head + active * others
    assert figures["flops_per_token"] == pytest.approx(executed, rel=4 * 16 * 32 * 2 * rest / tokens / executed)
    assert figures["flops_skipped"] == 1 - figures["flops_per_token"] / figures["flops_per_token_dense"]
    assert figures["flops_skipped"] < figures["tlops_skipped"]


def test_dense_skips_nothing_under_any_name(dense):
    found = evaluate(dense, timing=False)
    assert found["soft"] == found["hard"] == found["sparse"]
    assert found["soft"]["active_fraction"] == 1.0
    for name in ("tlops_saved_soft", "tlops_skipped", "flops_skipped", "router_parameters", "decision_flips"):
        assert found[name] == 0, name
    assert found["flops_per_token"] == found["flops_per_token_dense"]
    assert found["controls"] == {}
    assert (found["passage"]["sites"], found["passage"]["soft"], found["passage"]["hard"]) == ([], [], [])
    assert found["soft"]["loss"] == pytest.approx(by_hand(dense, "val", "soft")[0], rel=ROUNDING)


# --- controls ---------------------------------------------------------------------------------------------------------


def test_controls_are_told_apart_from_the_trained_router(figures):
    controls = figures["controls"]
    assert controls.keys() == {
        *("untrained_router_soft", "untrained_router_hard", "random_decisions_hard", "kept_weights_hard")
    }
    assert controls["kept_weights_hard"]["loss"] != figures["hard"]["loss"], "or nothing was kept"
    for control in controls.values():
        assert control.keys() == {"loss", "active_fraction"}
        assert math.isfinite(control["loss"])
    assert controls["untrained_router_soft"]["active_fraction"] != figures["soft"]["active_fraction"]
    alpha, tokens = figures["hard"]["active_fraction"], figures["tokens"]
    # Five standard deviations of the mean of that many random decisions.
    assert abs(controls["random_decisions_hard"]["active_fraction"] - alpha) < 5 * math.sqrt(0.25 / (2 * tokens))
    assert controls["random_decisions_hard"]["loss"] != figures["hard"]["loss"]


def test_an_untrained_router_keeps_sigmoid_of_one(tmp_path):
    """With a learning rate of zero the run is its own control."""
    found = evaluate(trained(tmp_path, steps=1, lr=0.0), timing=False)
    # Random biases of a router's hidden layer move its logit by 0.04 (one sigma), the mean by 0.006; times five.
    assert found["soft"]["active_fraction"] == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert found["hard"]["active_fraction"] == 1.0
    for execution in ("soft", "hard"):
        control = found["controls"][f"untrained_router_{execution}"]
        assert control == {key: found[execution][key] for key in ("loss", "active_fraction")}


# --- the passage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_passage_is_the_start_of_the_split_with_its_decisions(tsa, split):
    passage = evaluate(tsa, split=split, timing=False)["passage"]
    tenth = {"val": 8, "test": 9}[split]
    start = len(TEXT) * tenth // 10
    assert "".join(passage["pieces"]) == TEXT[start : start + 16].replace("\n", "↵")
    assert passage["sites"] == ["block 1", "block 2"]
    assert np.shape(passage["soft"]) == np.shape(passage["hard"]) == (2, 16)
    assert set(np.unique(passage["hard"])) <= {0, 1}
    assert np.min(passage["soft"]) >= 0
    assert np.max(passage["soft"]) <= 1
    assert passage["surprisal"][0] is None
    assert len(passage["surprisal"]) == 16
    model = load_model(tsa, CPU)
    ids = torch.tensor([sorted(set(TEXT)).index(char) for char in TEXT[start : start + 16]])
    with torch.no_grad():
        out = model(ids[None])
    nats = -out.logits[0].log_softmax(-1)[torch.arange(15), ids[1:]]
    assert passage["surprisal"][1:] == pytest.approx(nats.tolist(), abs=1e-4)
    np.testing.assert_allclose(passage["soft"], out.trace.work[1:, 0], atol=1e-4)


# --- copy and sort ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corpus", ["copy", "sort"])
def test_copy_and_sort_give_accuracy_and_perplexity_over_the_target_only(tmp_path, corpus):
    run = trained(tmp_path, corpus=corpus, source_length=3, steps=30)
    found = evaluate(run, timing=False)
    json.dumps(found, allow_nan=False)
    model, dataset = load_model(run, CPU), load(run.config.data)
    for execution in EXECUTIONS:
        nats, hits = [], []
        for inputs, targets in dataset.windows("val", 16, 1000):  # as in the evaluation
            with torch.no_grad():
                logits = model(torch.from_numpy(inputs), execution=execution).logits.double()
            rows, wanted = logits[:, 4:].flatten(0, 1), torch.from_numpy(targets[:, 4:]).flatten()  # after SEP
            nats += (-rows.log_softmax(-1)[torch.arange(len(rows)), wanted]).tolist()
            hits += (rows.argmax(-1) == wanted).tolist()
        assert len(nats) == 1000 * 4  # three symbols and EOS
        assert found[execution]["loss"] == pytest.approx(np.mean(nats), rel=ROUNDING)
        assert found[execution]["accuracy"] == np.mean(hits)
        assert found[execution]["perplexity"] == math.exp(found[execution]["loss"])
        assert "bits_per_character" not in found[execution]
    assert found["soft"]["accuracy"] > 0.25  # it has learnt where EOS is
    assert found["passage"]["pieces"][0] == "<bos>"
    assert len(found["passage"]["pieces"]) == 8  # BOS, three symbols, SEP, three symbols


def test_a_run_that_diverged_is_still_a_number_or_one_line(tmp_path):
    """A loss of 1,000 nats is finite, its perplexity is not."""
    run = trained(tmp_path, corpus="copy", source_length=3, steps=1)
    weights = {name: array.copy() for name, array in run.weights().items()}
    weights["norm.weight"] *= 1e5
    run.finish(weights)
    try:
        found = evaluate(run, timing=False)
    except UserError as error:
        assert one_line(error)  # noqa: PT017 either is right
    else:
        assert found["soft"]["loss"] > 710
        json.dumps(found, allow_nan=False)


# --- errors -----------------------------------------------------------------------------------------------------------


def refused(run: Run, **options) -> str:
    with pytest.raises(UserError) as raised:
        evaluate(run, timing=False, **options)
    return one_line(raised.value)


@pytest.fixture
def copied(tsa, tmp_path) -> Run:
    """A copy of the trained run that a test may damage."""
    run = Run(tmp_path / "copy")
    run.path.mkdir()
    for file in tsa.path.iterdir():
        (run.path / file.name).write_bytes(file.read_bytes())
    assert evaluate(run, timing=False)["tokens"] > 0
    return run


@pytest.mark.parametrize("split", ["nope", "train", "", "VAL"])
def test_another_split_is_refused(tsa, split):
    message = refused(tsa, split=split)
    assert repr(split) in message
    assert "val or test" in message


def test_cuda_where_there_is_none_is_refused(tsa, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda" in refused(tsa, device="cuda")


def test_a_run_that_is_missing_or_not_finished_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such run folder") as raised:
        Run.open(tmp_path / "missing")
    one_line(raised.value)
    with pytest.raises(UserError, match="missing"):
        evaluate(Run(tmp_path / "missing"))
    config = tiny(tmp_path, steps=2)
    config = replace(config, model=replace(config.model, vocab_size=load(config.data).tokenizer.vocab_size))
    message = refused(Run.create(tmp_path / "unfinished", config, resume=False))
    assert "not finished" in message
    assert "--resume" in message


def test_weights_that_were_changed_are_refused(copied):
    path = copied.path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 64
    path.write_bytes(content)
    assert f"{path} is damaged" in refused(copied)


@pytest.mark.parametrize(
    "change", [{"seed": 5}, {"lr": 0.5}, {"d_ff": 128}, {"n_layer": 4}, {"vocab_size": 0}, {"context": 8}]
)
def test_a_config_that_was_changed_is_refused(copied, change):
    tree = json.loads((copied.path / "config.json").read_text())
    part = "train" if change.keys() <= tree["train"].keys() else "model"
    edit_json(copied.path / "config.json", **{part: {**tree[part], **change}})
    assert f"{copied.path / 'config.json'} is damaged" in refused(copied)


def test_weights_of_another_shape_are_refused_though_their_manifest_fits(copied):
    copied.finish({name: array for name, array in copied.weights().items() if "router" not in name})
    message = refused(copied)
    assert "does not fit" in message
    assert "model.safetensors" in message


def test_weights_that_are_no_numbers_are_refused_though_their_manifest_fits(copied):
    copied.finish({name: np.full_like(array, np.nan) for name, array in copied.weights().items()})
    assert f"{copied.path / 'model.safetensors'}: its " in refused(copied)


@pytest.mark.parametrize(
    "text", [TEXT[::-1], TEXT.replace("g", "G"), TEXT + "äöü" * 200], ids=["order", "case", "more"]
)
def test_a_corpus_that_was_edited_since_is_refused(tmp_path, text):
    """The ids would mean other characters, or none; env.json contains the SHA-256 of the right text."""
    run = trained(tmp_path, steps=1)
    write_corpus(tmp_path, text)
    assert "corpus" in refused(run)


def test_a_corpus_that_is_gone_is_refused(tmp_path):
    run = trained(tmp_path, steps=1)
    (tmp_path / "corpus.txt").unlink()
    assert "no such file" in refused(run)


# --- a part of the split, and one model executed in many ways ---------------------------------------------------------


def test_the_beginning_of_a_split_is_measured_as_the_whole_is(dense):
    whole, part = evaluate(dense, timing=False), evaluate(dense, timing=False, tokens=64)
    assert part["tokens"] == 64 < whole["tokens"]
    model, dataset, context = load_model(dense, CPU), load(dense.config.data), dense.config.model.context
    inputs, targets = next(dataset.windows("val", context, 64 // context))
    logits = model(torch.from_numpy(inputs)).logits.flatten(0, 1)
    by_plain = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets).flatten())
    assert part["sparse"]["loss"] == pytest.approx(by_plain.item(), rel=ROUNDING)


def test_early_exit_is_executed_at_every_threshold_of_the_paper(tmp_path):
    run = trained(tmp_path, method=EarlyExitConfig(threshold=0.55), steps=30)
    found = evaluate(run, timing=False, curve=True)
    points = {point["threshold"]: point for point in found["curve"]}
    assert list(points) == [1.0, *PAPER_THRESHOLDS]
    assert points[1.0]["sparse"]["active_fraction"] == 1.0, "nothing is surer than certain"
    shares = [point["sparse"]["active_fraction"] for point in points.values()]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 1, "or this test shows nothing"
    assert points[0.55]["sparse"] == found["sparse"], "the run's own threshold is one of them"
    counted, taken = points[0.3]["read_early"], points[0.3]["sparse"]
    assert counted["loss"] != taken["loss"], "others see a token that left as if it had stayed"
    shares = [mode["active_fraction_per_site"][:2] for mode in (counted, taken)]
    assert shares[0] == shares[1], "who leaves first has seen nobody leave"
    assert points[1.0]["read_early"]["loss"] == pytest.approx(points[1.0]["sparse"]["loss"], rel=ROUNDING)


@pytest.mark.parametrize("exit", ["confidence", "learned"])
def test_one_block_has_no_exits_and_no_curve(tmp_path, exit):
    run = trained(tmp_path, method=EarlyExitConfig(exit=exit), steps=1, n_layer=1)
    assert not has_curve(run.config)
    with pytest.raises(UserError, match="no budget"):
        evaluate(run, timing=False, curve=True)


@pytest.mark.parametrize("dial", [True, False])
def test_only_a_model_with_a_dial_is_meant_for_several_budgets(tmp_path, dial):
    assert has_curve(tiny(tmp_path, method=BudgetConfig(dial=dial))) is dial


def test_learned_exits_are_executed_at_several_thresholds(tmp_path):
    run = trained(tmp_path, method=EarlyExitConfig(exit="learned", threshold=0.4), steps=30)
    found = evaluate(run, timing=False, curve=True)
    points = {point["threshold"]: point for point in found["curve"]}
    assert list(points) == [1.0, *HALTING_THRESHOLDS]
    shares = [point["sparse"]["active_fraction"] for point in points.values()]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0, "nothing is surer than certain"
    assert shares[-1] < 1, "or this test shows nothing"
    assert points[0.4]["sparse"] == found["sparse"], "the run's own threshold is one of them"
    assert "read_early" not in points[0.4], "a halting unit would ask the state that went on"
