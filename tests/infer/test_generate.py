"""Generation: a batch equals each prompt alone, texts may exceed the context, a terminal shows depth."""

import io
import itertools
import re
import sys

import pytest

import tokendepth as td
from tests.tiny import TEXT, one_line, tiny
from tokendepth.cli.main import main
from tokendepth.cli.shades import STEPS, shade
from tokendepth.config import BudgetConfig, ModelConfig, RunConfig
from tokendepth.data import ByteTokenizer
from tokendepth.infer.engine import Engine
from tokendepth.infer.sampling import Sampling
from tokendepth.measure import calibrate
from tokendepth.methods import build
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


@pytest.fixture(scope="module")
def budgeted(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("budget")
    return train(tiny(folder, BudgetConfig(), steps=1), folder / "run", show=False)


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}])
def test_prompts_together_are_continued_as_each_alone(budgeted, settings):
    """More prompts than slots, of different lengths, some longer than the context; all texts exceed it."""
    prompts = ["green", "", TEXT[:50], "40 "] * 5
    together = td.generate(budgeted, prompts, tokens=20, device="cpu", **settings)
    assert len(together) == 20
    last = together[-1].text
    alone = {prompt: td.generate(budgeted, prompt, tokens=20, device="cpu", **settings) for prompt in set(prompts)}
    for prompt, generation in zip(prompts, together, strict=True):
        expected = alone[prompt]
        assert generation.text == expected.text
        assert [t.depth for t in generation.tokens()] == [t.depth for t in expected.tokens()]
        assert generation.left_out == expected.left_out == (34 if len(prompt) == 50 else 0)
    assert last == together[-1].text


def test_a_text_ends_before_a_stop_string(budgeted):
    whole = td.generate(budgeted, "green", tokens=30, seed=1, device="cpu")
    stop = whole.text[4:7]
    for given in (stop, [stop], ["no such text", stop]):
        cut = td.generate(budgeted, "green", tokens=30, seed=1, device="cpu", stop=given)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.reason, whole.reason) == ("stop", "length")


def test_tokens_carry_what_was_asked_for(budgeted):
    generation = td.generate(budgeted, "green", tokens=4, logprobs=2, device="cpu")
    assert generation.reason is None
    for token in generation.tokens():
        assert token.choice.logprob is not None
        assert token.choice.logprob <= token.choice.top[0][1] <= 0
        assert len(token.choice.top) == 2
        assert len(token.depth) == len(generation.sites) == 3
        assert 0 < token.flops_share < 1.1, "routers may cost more than what is skipped"
    assert generation.reason == "length"


def test_a_context_of_one_token_is_enough():
    model = build(RunConfig(model=ModelConfig(32, 2, 4, 48, 1, 0.0, 256))).eval()
    engine = Engine(model, ByteTokenizer(), slots=1)
    request = engine.submit([7], Sampling(0), max_tokens=3, rolls=True)
    assert [token.trace.work.shape[2] for token in engine.stream(request)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ([], {}, "there is no prompt; give a text, or a list of at least one"),
        ("a", {"tokens": 0}, "tokens is 0; expected a number from 1 to"),
        ("a", {"top_p": 0}, "top_p is 0; expected a number above 0, at most 1"),
        ("a", {"stop": ""}, "a stop string is empty"),
        ("a", {"execution": "fast"}, "execution is 'fast'; expected one of soft, hard, sparse"),
        (["a", "\N{SNOWMAN}"], {}, "'\N{SNOWMAN}'"),
        ("a", {"budget": 2}, "budget is 2"),
    ],
)
def test_a_mistake_is_one_line_and_told_at_once(budgeted, prompt, settings, said):
    with pytest.raises(td.UserError) as error:
        td.generate(budgeted, prompt, device="cpu", **settings)
    assert said in one_line(error.value)


def test_what_the_context_does_not_hold_of_a_prompt_is_named(budgeted, capsys):
    main(["generate", str(budgeted.path), "--prompt", TEXT[:50], "--tokens", "2", "--temperature", "0"])
    found = capsys.readouterr()
    assert found.out.startswith(TEXT[:50])
    assert "tokendepth: the prompt is longer than the context of this model; its first 34 tokens" in found.err


# --- in a terminal ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(run: Run, monkeypatch, **environment: str) -> str:
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR", "TERM", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        main(["generate", str(run.path), "--prompt", "green", "--tokens", "12", "--seed", "2", "--device", "cpu"])
        return sys.stdout.getvalue()


ESCAPES = re.compile(r"\x1b\[([\d;]*)m")


@pytest.mark.parametrize("kind", ["xterm-256color", "truecolor"])
def test_each_token_has_the_shade_of_its_depth(budgeted, monkeypatch, kind):
    found = shown(budgeted, monkeypatch, TERM="xterm-256color", COLORTERM="truecolor" if kind == "truecolor" else "")
    legend, text = found.split("\n", 1)
    assert ESCAPES.sub("", legend) == "depth:  0%  25%  50%  75%  100%  of the routed blocks processed the token"
    generation = td.generate(budgeted, "green", tokens=12, seed=2, device="cpu")
    assert ESCAPES.sub("", text) == "green" + generation.text
    shades = [code for code in ESCAPES.findall(legend) if code != "0"]
    assert len(set(shades)) == STEPS + 1
    expected = [shades[round(token.active_fraction * STEPS)] for token in generation.tokens() if token.text != "\n"]
    assert [code for code in ESCAPES.findall(text) if code != "0"] == expected
    assert len({*expected}) > 1, "tokens of different depths"


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}, {"TERM": "xterm"}]
)
def test_without_colours_the_text_is_plain(budgeted, monkeypatch, environment):
    generation = td.generate(budgeted, "green", tokens=12, seed=2, device="cpu")
    assert shown(budgeted, monkeypatch, **environment) == "green" + generation.text


def test_piped_text_is_plain(budgeted, capsys):
    main(["generate", str(budgeted.path), "--prompt", "green", "--tokens", "12"])
    assert "\x1b" not in capsys.readouterr().out


def test_shades_get_darker_with_depth():
    """Lightness alone must show it, for colour-blind users."""
    steps = [shade(n / STEPS).triplet for n in range(STEPS + 1)]
    light = [0.2126 * s.red + 0.7152 * s.green + 0.0722 * s.blue for s in steps if s is not None]
    assert all(a - b > 15 for a, b in itertools.pairwise(light))
    assert len(light) == STEPS + 1


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _everyone_is_active(monkeypatch):
    """Thresholds below every score, whatever the budget."""

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
