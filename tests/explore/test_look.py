"""The results for the page are what the model computes."""

import threading

import pytest
import torch

from tests.explore.conftest import CONTEXT, METHODS
from tests.tiny import TEXT, one_line
from tokendepth.errors import UserError
from tokendepth.explore import look as looking
from tokendepth.explore.explored import Explored
from tokendepth.explore.look import LIKELIEST, MOST_TOKENS, look
from tokendepth.infer.text_model import TextModel
from tokendepth.measure import calibrate
from tokendepth.trace import EXECUTIONS

SHORT = TEXT[: CONTEXT - 5]


@pytest.fixture(scope="session")
def model_of(run_of):
    return lambda method: TextModel.of(run_of(method), "cpu")


def seen(model: TextModel, text: str, execution="sparse", **options) -> dict:
    return look(model.network, model.tokenizer, text, execution, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_text_is_one_pass_of_the_model(model_of, method, execution):
    model = model_of(method)
    found, expected = seen(model, SHORT, execution), model(SHORT, execution=execution)
    totals, logs = expected.trace.totals(), expected.logits[0].log_softmax(-1)
    assert found["work"] == [[round(value, 3) for value in row] for row in expected.trace.work[:, 0].float().tolist()]
    assert [site["name"] for site in found["sites"]] == [site.name for site in expected.trace.sites]
    assert "".join(found["pieces"]) == SHORT
    nats = [-float(logs[t, token]) for t, token in enumerate(found["ids"][1:])]
    assert found["surprisal"] == [None, *(pytest.approx(each, abs=6e-4) for each in nats)]
    assert found["loss"] == pytest.approx(sum(nats) / len(nats))
    assert found["active_fraction"] == pytest.approx(totals.active_fraction)
    assert found["flops_skipped"] == (pytest.approx(totals.flops_skipped) if execution == "sparse" else None)
    for t, likeliest in enumerate(found["expected"]):
        shares, tokens = logs[t].exp().topk(LIKELIEST)
        assert [piece for piece, _ in likeliest] == model.tokenizer.pieces(tokens.tolist())
        assert [share for _, share in likeliest] == pytest.approx(shares.tolist(), abs=6e-5)


@pytest.mark.parametrize("method", ["tsa", "span"])
@pytest.mark.parametrize("at_once", [1, 2 * CONTEXT, 4096])
def test_a_long_text_is_read_in_windows(model_of, method, at_once, monkeypatch):
    monkeypatch.setattr(looking, "AT_ONCE", at_once)
    model, text = model_of(method), TEXT[: 3 * CONTEXT + 7]
    found = seen(model, text)
    windows = [text[n : n + CONTEXT] for n in range(0, len(text), CONTEXT)]
    parts = [seen(model, window) for window in windows]
    assert found["work"] == [
        [value for part in parts for value in part["work"][site]] for site in range(len(found["sites"]))
    ]
    for n, part in enumerate(parts):
        own = found["surprisal"][n * CONTEXT : (n + 1) * CONTEXT]
        assert own[1:] == part["surprisal"][1:]
        assert (own[0] is None) == (n == 0), "a window's first token is foreseen by the window before"
    last = seen(model, windows[0])["expected"][-1]
    assert found["expected"][CONTEXT - 1] == last
    assert len(found["expected"]) == len(found["ids"]) == len(text)


def test_thresholds_re_route_one_text_alone(model_of):
    model = model_of("budget")
    routed = sum(site["routed"] for site in seen(model, SHORT)["sites"])
    everything, nothing = (seen(model, SHORT, thresholds=[limit] * routed) for limit in (-1e9, 1e9))
    assert everything["active_fraction"] == 1
    assert nothing["active_fraction"] == 0
    assert nothing["flops_skipped"] > everything["flops_skipped"]
    assert seen(model, SHORT)["active_fraction"] == pytest.approx(model(SHORT).trace.totals().active_fraction), (
        "the model's own are as before"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the text is empty; type at least one character"),
        ("a" * (MOST_TOKENS + 1), f"the text has {MOST_TOKENS + 1:,} tokens; expected at most {MOST_TOKENS:,}"),
        ("green \u2603", "'\u2603'"),
    ],
)
def test_a_text_that_cannot_be_read(model_of, text, words):
    with pytest.raises(UserError) as caught:
        seen(model_of("tsa"), text)
    assert words in one_line(caught.value)


def test_one_token_has_no_loss(model_of):
    found = seen(model_of("tsa"), "g")
    assert found["loss"] is None
    assert found["surprisal"] == [None]
    assert len(found["expected"]) == 1


# --- at several budgets -----------------------------------------------------------------------------------------------


def test_budgets_are_calibrated_on_training_text(run_of):
    explored = Explored(run_of("budget"), "cpu")
    explored.start()
    try:
        explored._thread.join()
        dial = explored.facts["dial"]
        assert dial["points"] == sorted({*explored.dial.points, explored.dial.own})
        assert (dial["coming"], dial["missing"]) == (0, None)
        shares = [explored.look(TEXT[:2000], "sparse", point)["active_fraction"] for point in dial["points"]]
        assert shares == sorted(shares)
        assert shares == pytest.approx(dial["points"], abs=0.1)
        assert explored.look(SHORT, "sparse", None) | {"seconds": 0} == explored.look(
            SHORT, "sparse", explored.dial.own
        ) | {"seconds": 0}
    finally:
        explored.stop()


def test_a_dial_without_thresholds_for_each_pass_leaves_the_writing_model_alone(run_of):
    explored = Explored(run_of("early_exit"), "cpu")
    try:
        shares = [explored.look(SHORT, "sparse", point)["active_fraction"] for point in (1e-6, max(explored.points))]
        assert shares == [0, 1], "with a low threshold all tokens leave at once, with a high one none"
        assert explored.service.engine.model.method.threshold == explored.dial.own
        assert explored.look(SHORT, "sparse", None)["active_fraction"] == pytest.approx(
            TextModel.of(explored.run, "cpu")(SHORT).trace.totals().active_fraction
        )
    finally:
        explored.stop()


def test_stopped_it_looks_for_no_more_thresholds(run_of, monkeypatch):
    explored = Explored(run_of("budget"), "cpu")
    found, enough = [], threading.Event()
    real = calibrate.calibrate

    def slowly(model, dataset, point, **how):
        found.append(point)
        enough.wait(20)
        real(model, dataset, point, **how)

    monkeypatch.setattr(calibrate, "calibrate", slowly)
    explored.start()
    explored._stopping.set()
    enough.set()
    explored.stop()
    assert not explored._thread.is_alive()
    assert len(found) <= 1
    assert explored.points == [explored.dial.own]


def test_without_its_corpus_a_run_keeps_its_own_budget(run_of, monkeypatch):
    def gone(run):
        raise UserError("the corpus is gone; restore it")

    monkeypatch.setattr("tokendepth.explore.explored.dataset_of", gone)
    explored = Explored(run_of("span"), "cpu")
    explored.start()
    try:
        explored._thread.join()
        assert explored.facts["dial"]["missing"] == "the corpus is gone; restore it"
        assert explored.points == [explored.dial.own]
        assert torch.tensor(explored.look(SHORT, "hard", explored.dial.own)["work"]).sum() > 0
    finally:
        explored.stop()
