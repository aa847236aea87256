"""import tokendepth as td: lazy, typed, documented, and every example in it works."""

import ast
import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tokendepth as td
from paper.api_page import ORDER
from tests.hf.models import write_llama
from tests.tiny import TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    (folder / "corpus.txt").write_text(TEXT * 4 + "def depth(token): hello world\n", encoding="utf-8")
    write_llama(folder / "models" / "llama")
    return folder


@pytest.fixture(scope="module")
def run(folder) -> td.Run:
    model = {"model.d_model": 16, "model.n_layer": 3, "model.n_head": 2, "model.d_ff": 32, "model.context": 32}
    small = {"data.corpus": f"text:{folder / 'corpus.txt'}", **model, "train.steps": 2, "train.batch_size": 2}
    return td.train(td.recipe("demo.budget", small), folder / "budget", show=False)


@pytest.fixture(scope="module")
def model(run) -> td.TextModel:
    return td.load(run, device="cpu")


def test_importing_it_is_quick_and_needs_no_torch():
    code = (
        "import sys, time; start = time.perf_counter(); import tokendepth as td; "
        "took = time.perf_counter() - start; td.recipe('demo.tsa'); "
        "print(took, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    took, torch_there, numpy_there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(took) < 0.1
    assert (torch_there, numpy_there) == ("False", "False")


def test_every_name_is_there_and_documented():
    assert set(td.__all__) <= set(dir(td))
    for name in td.__all__:
        assert inspect.getdoc(getattr(td, name)), name
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = td.tarin  # pyright: ignore[reportAttributeAccessIssue]


def test_what_a_type_checker_sees_is_what_there_is():
    source = ast.parse(Path(td.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    seen = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert sorted(seen) == sorted(td.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(td, name)


def test_the_examples_work_one_after_the_other(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert sorted(ORDER) == sorted(td.__all__)
    runner, finder = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), doctest.DocTestFinder(recurse=False)
    for name in ORDER:  # the examples of `recipe` and `train` make the run that the others use
        (example,) = finder.find(getattr(td, name), name, module=False, globs={"td": td})
        assert example.examples, f"{name} has no example"
        assert runner.run(example, clear_globs=False).failed == 0, name


def test_text_and_ids_give_the_same(model):
    text = "to be"
    ids = model.tokenizer.encode(text)
    given = [text, [text], ids, torch.tensor(ids), torch.tensor([ids])]
    outputs = [model(inputs) for inputs in given]
    for out in outputs[1:]:
        torch.testing.assert_close(out.logits, outputs[0].logits, rtol=0, atol=0)
        assert torch.equal(out.trace.work, outputs[0].trace.work)


def test_texts_of_different_lengths_are_what_each_is_alone(model):
    texts = ["to be", "or not to be, that", "i"]
    together = model(texts)
    assert together.trace.valid.sum(1).tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        alone = model(text)
        torch.testing.assert_close(together.logits[row, : len(text)], alone.logits[0])
        assert torch.equal(together.trace.work[:, row, : len(text)], alone.trace.work[:, 0])


def test_by_default_a_loaded_model_skips(model):
    out = model("to be, or not")
    assert out.trace.execution == "sparse"
    assert not out.logits.requires_grad
    torch.testing.assert_close(out.logits, model("to be, or not", execution="hard").logits)


def test_a_budget_can_be_set(run):
    shares = [td.load(run, device="cpu", budget=budget)(TEXT[:30]).trace.totals().work[1] for budget in (0.2, 1.0)]
    assert shares[0] < shares[1] == 30


def test_a_generation_can_be_read_twice_and_streams(run):
    generation = td.generate(run, "to be", tokens=4, seed=1, device="cpu")
    first = next(iter(generation))
    assert len(generation.spending.depth) == 1
    assert generation.text.startswith(first)
    assert generation.text == "".join(generation) == td.generate(run, "to be", tokens=4, seed=1, device="cpu").text


def keys_of(function: Callable) -> set[str]:
    """What the table in a docstring lists."""
    rows = re.findall(r"^ *\| (`.*?) \|", function.__doc__ or "", re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def test_the_keys_of_results_are_listed(run, folder):
    result = td.evaluate(run, timing=False, device="cpu", tokens=40)
    elsewhere = {"untouched", "block_flops", "flops_per_token_full_rows"}  # of retrofits, of methods that pack
    assert keys_of(td.evaluate) == set(result) | elsewhere
    item = {"context": "green ", "choices": ["bottles", "walls"], "answer": 0}
    (folder / "one.jsonl").write_text(json.dumps(item), encoding="utf-8")
    score = td.score(run, folder / "one.jsonl", device="cpu")
    assert set(score) == {"method", "execution", "budget", "env", "tasks"}
    assert keys_of(td.score) == set(score["tasks"]["one"])
    study = td.analysis.analyse([run], corpus=f"text:{folder / 'corpus.txt'}", device="cpu")
    assert keys_of(td.analysis.analyse) == set(study) | set(study["runs"][0])


def test_evaluating_part_of_a_split_keeps_nothing(run):
    before = run.evaluation
    assert td.evaluate(run, tokens=40, timing=False, device="cpu")["tokens"] < 200
    assert run.evaluation == before is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, run: model(""), "a text is empty"),
        (lambda model, run: model([]), "a text is empty"),
        (lambda model, run: model(["to", ""]), "a text is empty"),
        (lambda model, run: model(torch.zeros(1, 0, dtype=torch.long)), "a text is empty"),
        (lambda model, run: model([1, 10_000]), "token id 10000 is out of range; expected 0 to"),
        (lambda model, run: model(torch.tensor([-3])), "token id -3 is out of range; expected 0 to"),
        (lambda model, run: model(["a", 1]), "texts and ids are mixed"),
        (lambda model, run: model("a" * 33), "do not fit this model's context of 32"),
        (lambda model, run: model("a", execution="fast"), "execution is 'fast'; expected one of soft, hard, sparse"),
        (lambda model, run: td.load(run, device="gpu"), "device is 'gpu'; expected auto, cpu or cuda"),
        (lambda model, run: td.load("nowhere"), "nowhere"),
        (lambda model, run: td.evaluate(run, tokens=0), "tokens is 0; expected at least 1, or None"),
        (lambda model, run: td.recipe("demo.tsa", {"train.step": 1}), "did you mean '--train.steps'"),
        (lambda model, run: td.recipe("demo.tsa", {"train.steps": "many"}), "train.steps is 'many'"),
        (lambda model, run: td.recipe("demo.tsa", {"train.steps": 1.5}), "train.steps is 1.5"),
    ],
)
def test_a_mistake_is_one_line(call, said, model, run):
    with pytest.raises(td.UserError) as error:
        call(model, run)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: td.train("demo.span", "runs/x"), "config is 'demo.span'; expected a RunConfig, as td.recipe(NAME)"),
        (lambda: td.build("demo.span"), "config is 'demo.span'; expected a RunConfig, as td.recipe(NAME) returns"),
        (lambda: td.compile("runs/x"), "model is 'runs/x'; expected a model: td.load(RUN) or td.build(CONFIG)"),
    ],
)
def test_a_name_where_an_object_is_needed_is_said_to_be(call, said):
    with pytest.raises(TypeError) as error:
        call()
    assert said in str(error.value)
