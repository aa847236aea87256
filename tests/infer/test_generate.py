"""Generation: what a cache gives is what reading all anew gives, and it costs what is new."""

import pytest
import torch

from tests.tiny import tiny
from tokendepth.cli.main import main
from tokendepth.config import METHOD_CONFIGS, BudgetConfig, EarlyExitConfig, ModelConfig, RunConfig
from tokendepth.infer.generate import Decoder
from tokendepth.measure import calibrate
from tokendepth.methods import build
from tokendepth.model import LanguageModel
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

CONTEXT, VOCABULARY = 16, 11
ROUNDING = 1e-5
"""Of the largest logit, as in the contract."""


def model_of(method: str) -> LanguageModel:
    """With matrices that matter, and deep enough for those that share layers."""
    config = EarlyExitConfig(threshold=0.4) if method == "early_exit" else METHOD_CONFIGS[method]()
    model = build(RunConfig(model=ModelConfig(32, 4, 4, 48, CONTEXT, 0.0, VOCABULARY), method=config)).eval()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


def text(length: int) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("method", METHOD_CONFIGS)
@pytest.mark.parametrize("prompt", [1, 5, CONTEXT])
def test_up_to_the_context_a_token_is_computed_from_all_before_it(method, prompt):
    model, ids = model_of(method), text(CONTEXT)
    decode = Decoder(model, "sparse")
    with torch.no_grad():
        for seen in range(prompt, CONTEXT + 1):
            found = decode(ids[:seen]).logits[0, -1]
            whole = model(torch.tensor([ids[:seen]]), execution="sparse").logits[0, -1]
            assert (found - whole).abs().max() <= ROUNDING * whole.abs().max()


def test_beyond_it_a_token_is_computed_from_half_a_context_at_least():
    model, ids = model_of("tsa"), text(3 * CONTEXT)
    decode, begins = Decoder(model, "sparse"), 0
    with torch.no_grad():
        for seen in range(CONTEXT, len(ids) + 1):
            found = decode(ids[:seen]).logits[0, -1]
            if seen - begins > CONTEXT:
                begins = seen - CONTEXT // 2
            whole = model(torch.tensor([ids[begins:seen]]), execution="sparse").logits[0, -1]
            assert (found - whole).abs().max() <= ROUNDING * whole.abs().max()
            assert CONTEXT // 2 <= seen - begins <= CONTEXT


def test_what_is_in_the_cache_is_not_computed_again():
    model, ids = model_of("dense"), text(2 * CONTEXT)
    decode = Decoder(model, "sparse")
    with torch.no_grad():
        computed = [decode(ids[:seen]).trace.work.shape[-1] for seen in range(5, 2 * CONTEXT + 1)]
    full, half = CONTEXT - 5, CONTEXT // 2
    assert computed == [5, *[1] * full, half, *[1] * half, half, *[1] * (len(computed) - full - half - 3)]


def test_a_context_of_one_token_is_enough():
    model = build(RunConfig(model=ModelConfig(32, 2, 4, 48, 1, 0.0, VOCABULARY))).eval()
    decode = Decoder(model, "sparse")
    with torch.no_grad():
        assert [decode(text(n)).logits.shape[1] for n in (1, 2, 3)] == [1, 1, 1]


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("budget")
    return train(tiny(folder, BudgetConfig(), steps=1), folder / "run", show=False)


@pytest.fixture
def _everyone_is_active(monkeypatch):
    """Thresholds that no score falls short of, whatever budget is asked for."""

    def rigged(model, run, budget, *_, **__):
        model.method.set_thresholds([-1e9] * len(model.method.thresholds))

    monkeypatch.setattr(calibrate, "set_budget", rigged)


@pytest.mark.usefixtures("_everyone_is_active")
@pytest.mark.parametrize("command", [["generate", "--tokens", "7"], ["evaluate", "--no-timing", "--json"]])
def test_a_text_that_is_off_its_budget_is_named_with_the_reason(command, budgeted, capsys):
    main([command[0], str(budgeted.path), *command[1:], "--budget", "0.6"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("tokendepth: budget 0.6 was asked for, but 1.000 of these ")
    assert "tokens were active: thresholds hold the budget on average over training text" in line


@pytest.mark.usefixtures("_everyone_is_active")
@pytest.mark.parametrize("command", [["generate", "--tokens", "7"], ["evaluate", "--no-timing", "--json"]])
def test_a_text_near_its_budget_is_not_talked_about(command, budgeted, capsys):
    main([command[0], str(budgeted.path), *command[1:], "--budget", "0.96"])
    assert "asked for" not in capsys.readouterr().err
