"""tokendepth export: transformers loads the folder with the run's ids and logits; it is written atomically."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tokendepth as td
from tests.hf.models import write_llama
from tests.tiny import TEXT, one_line, tiny
from tokendepth.cli.main import main
from tokendepth.config import BudgetConfig, DataConfig, RunConfig, TSAConfig
from tokendepth.data.bpe import train_bpe
from tokendepth.data.of_run import tokenizer_of
from tokendepth.errors import UserError
from tokendepth.hf import TokenDepthForCausalLM, export
from tokendepth.training.loop import train

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLE = "7 green bottles \u2013\n hanging, 12 "
KINDS = ("char", "byte", "bpe:300", "tokenizer")


def run_of(folder: Path, tokens: str = "char", method=None, **changes) -> td.Run:
    config = tiny(folder, method, steps=2, **changes)
    if tokens == "tokenizer":  # a user's tokenizer that prepends a token to every text
        tree = json.loads(train_bpe([TEXT], 280).text)
        tree["added_tokens"] = [{"id": 280, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
                                 "rstrip": False, "normalized": False}]  # fmt: skip
        tree["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [280], "tokens": ["<s>"]}},
        }
        (folder / "theirs.json").write_text(json.dumps(tree))
        tokens = f"tokenizer:{folder / 'theirs.json'}"
    data = DataConfig(config.data.corpus, tokens)
    config = RunConfig(data, config.model, config.method, config.train, recipe="demo.tsa")
    return train(config, folder / "run", show=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, td.Run]:
    return {kind: run_of(tmp_path_factory.mktemp("runs"), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory) -> Path:
    return td.export(runs["char"], tmp_path_factory.mktemp("exported") / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_text_and_logits_are_the_runs(kind, runs, tmp_path):
    run = runs[kind]
    td.export(run, tmp_path / "out")
    tokenizer, own = AutoTokenizer.from_pretrained(tmp_path / "out"), tokenizer_of(run)
    model, native = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), td.load(run, device="cpu")
    text = SAMPLE[:14]
    ids = own.encode(text)
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == own.decode(ids) == text
    assert tokenizer.model_max_length == 16
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, native(ids).logits)
    batch = tokenizer([text, text[:4]], padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(1).tolist() == [len(ids), len(own.encode(text[:4]))]
    together = model.generate(**batch, max_new_tokens=2, do_sample=False)
    alone = model.generate(**tokenizer(text[:4], return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert torch.equal(together[1, -2:], alone[0, -2:])


@pytest.mark.parametrize("begins", [False, True])
def test_an_imported_model_goes_out_as_it_came_in(begins, tmp_path):
    """Including tokens at the beginning and end of a text, and the chat template."""
    theirs = write_llama(tmp_path / "theirs", begins=begins)
    td.export(td.import_model(theirs, tmp_path / "run"), tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("theirs", "out"))
    for text in ("7 green bottles", "<s>green</s> bottles"):
        assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after(["green"])["input_ids"][0][0] == (0 if begins else after("green")["input_ids"][0])
    assert (after.chat_template, after.eos_token) == ("{{ messages }}", "</s>")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [1]
    assert model.generation_config.bos_token_id == (0 if begins else None)


def test_symbols_have_their_special_tokens(tmp_path):
    config = tiny(tmp_path, corpus="copy", steps=2, context=42)
    run = train(config, tmp_path / "run", show=False)
    td.export(run, tmp_path / "out")
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path / "out"), "<bos>4a7<sep>4a7<eos>"
    assert tokenizer(text)["input_ids"] == tokenizer_of(run).encode(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 3
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0


def test_an_evaluated_run_has_its_results_on_its_card(tmp_path, capsys):
    run = run_of(tmp_path, method=BudgetConfig(budget=0.5))
    td.export(run, tmp_path / "before")
    assert "was not evaluated" in (tmp_path / "before" / "README.md").read_text()
    found = td.evaluate(run, timing=False, device="cpu")
    main(["export", str(run.path), str(tmp_path / "after")])
    assert str(tmp_path / "after") in capsys.readouterr().out
    card = (tmp_path / "after" / "README.md").read_text()
    sparse = found["sparse"]
    row = f"| sparse | {sparse['loss']:.4f} | {sparse['active_fraction']:.3f} | {100 * found['flops_skipped']:.1f}% |"
    assert row in card
    assert "| soft |" not in card, "this method has no soft execution of its own"
    assert f"{found['tokens']:,} tokens" in card
    assert f"{found['parameters']:,} parameters" in card
    assert str(tmp_path) not in card, "where the corpus lies is nobody's business"
    assert "--data.corpus=text:corpus.txt" in card


def test_the_command_on_the_card_is_the_runs_config(exported, runs):
    from tokendepth.cli.commands.one import config_of
    from tokendepth.cli.main import parse

    card = (exported / "README.md").read_text()
    command = card.split("## How it was trained")[1].split("```")[1].split("\ntokendepth evaluate")[0]
    config = config_of(parse(command.replace("\\\n", " ").split()[1:]).recipe)
    assert config.model == runs["char"].config.model
    assert config.train == runs["char"].config.train
    assert config.method == runs["char"].config.method == TSAConfig(depth_penalty=0.1)


def test_without_a_recipe_the_card_has_the_config(tmp_path):
    run = train(tiny(tmp_path, steps=2), tmp_path / "run", show=False)
    card = (td.export(run, tmp_path / "out") / "README.md").read_text()
    assert json.loads(card.split("```json")[1].split("```")[0])["model"]["d_model"] == 32


def test_an_export_is_replaced_and_what_is_foreign_is_not(exported, runs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    td.export(runs["char"], out)  # an empty folder may be used
    (out / "model.safetensors").write_bytes(b"old")
    (tmp_path / f".tmp-out-{os.getpid() + 1}").mkdir()  # left by a killed export
    td.export(runs["char"], out)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in exported.iterdir())
    assert (out / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target, said in (
        (out, "holds notes.txt"),
        (tmp_path / "file", "is a file"),
        (runs["char"].path, "holds MANIFEST.json"),
    ):
        before = sorted(target.rglob("*"))
        with pytest.raises(UserError) as error:
            td.export(runs["char"], target)
        assert said in one_line(error.value)
        assert sorted(target.rglob("*")) == before


def test_what_fails_on_the_way_leaves_nothing_behind(runs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    td.export(runs["char"], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "fast_tokenizer", full_disk)
    with pytest.raises(UserError) as error:
        td.export(runs["char"], out)
    assert "no space is left on the disk" in one_line(error.value)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_is_not_finished_is_not_exported(tmp_path):
    run = td.Run.create(tmp_path / "run", tiny(tmp_path), resume=False)
    with pytest.raises(UserError, match="is not finished"):
        td.export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- examples ---------------------------------------------------------------------------------------------------------


def run_example(name: str, *words: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_example_that_generates(exported, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(TokenDepthForCausalLM, "generate", _shorter(TokenDepthForCausalLM.generate))
        run_example("load_and_generate.py", str(exported), "7 green", monkeypatch=patch)
    text, spent = capsys.readouterr().out.rsplit("active fraction", 1)
    assert text.startswith("7 green")
    assert "FLOPs skipped" in spent


def _shorter(generate):
    """The toy model's context is 16 tokens."""
    return lambda self, *args, **options: generate(self, *args, **{**options, "max_new_tokens": 5})


def test_the_example_that_trains(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate", reason="needs the extra hf")
    run = run_of(tmp_path, method=BudgetConfig(budget=0.5))
    td.export(run, tmp_path / "model")
    (tmp_path / "more.txt").write_text(TEXT, encoding="utf-8")
    words = (str(tmp_path / "model"), str(tmp_path / "more.txt"), str(tmp_path / "tuned"), "2")
    run_example("finetune_with_trainer.py", *words, monkeypatch=monkeypatch)
    share = float(capsys.readouterr().out.rsplit("active fraction ", 1)[1].split(",")[0])
    assert abs(share - 0.5) < 0.15
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "tuned"))
    assert not torch.equal(before.model.norm.weight, after.model.norm.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned")("7 green")["input_ids"] == tokenizer_of(run).encode(
        "7 green"
    )
