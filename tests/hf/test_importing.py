"""A model folder becomes a finished run or gives a one-line error; without transformers."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tokendepth as td
from tests.hf.models import BEGIN, END, tokenizer_json, weights, write_llama, write_shards
from tests.hf.models import CONFIG as LLAMA
from tests.tiny import TEXT, edit_json, hashes, one_line
from tokendepth import data
from tokendepth.bench import forward
from tokendepth.cli.main import main
from tokendepth.config import DataConfig
from tokendepth.data.dataset import NO_LOSS
from tokendepth.data.imported import ImportedTokenizer
from tokendepth.data.of_run import dataset_of, tokenizer_of
from tokendepth.importing.convert import import_model
from tokendepth.measure.describe import describe
from tokendepth.measure.evaluate import batches
from tokendepth.report import build
from tokendepth.runs import run as run_module


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory) -> td.Run:
    return import_model(llama, tmp_path_factory.mktemp("runs") / "llama")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return f"text:{path}"


# --- the imported run -------------------------------------------------------------------------------------------------


def test_it_is_a_finished_run_that_names_its_source(run, llama):
    run.verify()
    assert run.config.data == DataConfig("none", "own")
    assert (run.config.recipe, run.config.model.vocab_size) == ("imported.llama", 304)
    env = run.env
    assert env is not None
    assert env["imported_from"] == "llama"
    assert "corpus_sha256" not in env


def test_the_source_is_told_by_what_sha256sum_prints(run, llama):
    names = sorted(path.name for path in llama.iterdir())
    listed = subprocess.run(["sha256sum", *names], cwd=llama, capture_output=True, check=True).stdout
    again = subprocess.run(["sha256sum"], input=listed, capture_output=True, check=True).stdout
    assert run.env["imported_sha256"] == again.split()[0].decode()


def test_every_weight_is_where_it_belongs(run):
    found, old = run.weights(), {name: weight.float().numpy() for name, weight in weights(LLAMA).items()}
    layer, block = "model.layers.1", "method.blocks.1"
    rows = [old[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(found[f"{block}.attention.qkv.weight"], np.concatenate(rows))
    rows = [old[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(found[f"{block}.ffn.gate_up.weight"], np.concatenate(rows))
    norm = old[f"{layer}.post_attention_layernorm.weight"]
    np.testing.assert_array_equal(found[f"{block}.norm_ffn.weight"], norm)
    assert sum(array.size for array in found.values()) == sum(array.size for array in old.values())
    assert {array.dtype for array in found.values()} == {np.dtype("float32")}


def test_parts_of_a_model_are_the_model(llama, run, tmp_path):
    parts = shutil.copytree(llama, tmp_path / "parts")
    write_shards(parts, weights(LLAMA))
    assert import_model(parts, tmp_path / "run").fingerprint == run.fingerprint


@pytest.mark.slow
def test_transformers_is_not_needed_for_a_folder(llama, tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['gguf'] = None; import tokendepth as td; "
        "print(td.import_model(sys.argv[1], sys.argv[2]).finished)"
    )
    arguments = [sys.executable, "-c", code, str(llama), str(tmp_path / "run")]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_all_that_works_on_runs_works_on_it(run, corpus, tmp_path, capsys):
    figures = td.evaluate(run, corpus=corpus, timing=False, device="cpu")
    assert run.evaluation is not None
    assert (run.evaluation["corpus"], figures["flops_skipped"]) == (corpus, 0.0)
    assert figures["hard"]["bits_per_byte"] > 0
    assert describe(run.config)["parameters"] == figures["parameters"]
    page = build([run], tmp_path / "report").read_text()
    assert "llama was imported" in page
    assert "text.txt (own llama)" in page
    assert "none: imported from llama" in page
    main(["evaluate", str(run.path), "--corpus", corpus, "--split", "test", "--no-timing"])
    assert "test loss" in capsys.readouterr().out


def test_it_is_timed_on_a_text_that_is_named(run, corpus, tmp_path, monkeypatch):
    """Checks what is timed, without minutes of compiling."""
    td.evaluate(run, corpus=corpus, timing=False, device="cpu")
    asked = []

    def compared(name, model, ids, cases, *, soft):
        asked.append((name, ids))
        return []

    monkeypatch.setattr(forward, "_compared", compared)
    words = ["--run", str(run.path), "--corpus", corpus, "--batches", "1", "--device", "cpu", "--out", str(tmp_path)]
    main(["bench", "forward", *words])
    ((name, ids),) = asked
    assert name == "llama"
    assert ids[0].tolist() == dataset_of(run, corpus).passage("val", run.config.model.context).tolist()


def test_a_corpus_may_be_named_once_and_for_all(llama, corpus, tmp_path):
    run = import_model(llama, tmp_path / "run", corpus=corpus)
    figures = td.evaluate(run, timing=False, device="cpu")
    assert figures["corpus"] == run.config.data.corpus == corpus
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1] * 3, encoding="utf-8")
    before = hashes(run.path)
    assert td.evaluate(run, corpus=f"text:{other}", timing=False, device="cpu")["corpus"] == f"text:{other}"
    assert before == hashes(run.path), "another text than its own is not kept"


@pytest.mark.parametrize(
    "command", [["evaluate"], ["calibrate", "--budget", "0.5"], ["bench", "forward", "--run"], ["train", "demo.dense"]]
)
def test_without_a_text_one_line_says_so(command, llama, tmp_path, capsys):
    run = import_model(llama, tmp_path / "run")
    if command[0] == "train":
        command = [*command, "--data.corpus", "none", "--out", str(tmp_path / "new")]
    elif command[0] == "bench":
        command = [*command, str(run.path)]
    else:
        command = [command[0], str(run.path), *command[1:]]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    expected = {
        "evaluate": "was imported without a corpus; name a text with --corpus text:PATH",
        "calibrate": "has no budget to set, as its method",
        "bench": "is not evaluated; run: tokendepth evaluate",
        "train": "data.corpus is 'none': there is no text; name one with --data.corpus text:PATH",
    }
    assert expected[command[0]] in line


def test_own_tokens_are_those_of_a_run():
    with pytest.raises(td.UserError) as error:
        data.load(DataConfig("stdlib", "own"))
    assert "only a run folder of an imported model has a tokenizer of its own" in one_line(error.value)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_that_the_tokenizer_lacks_is_never_generated(llama, tmp_path):
    """The model has 304 tokens, the tokenizer 302; here the last two are by far the most likely."""
    tensors = weights(LLAMA)
    tensors["model.embed_tokens.weight"][302:] *= 100
    folder = shutil.copytree(llama, tmp_path / "model")
    save_file(tensors, folder / "model.safetensors")
    run = import_model(folder, tmp_path / "run")
    logits = td.load(run)("green bottles").logits[0, -1]
    assert logits.abs().argmax() >= 302
    for temperature in (0, 5.0):
        text = td.generate(run, "green bottles", tokens=20, temperature=temperature).text
        assert text


def test_a_text_ends_where_the_model_says(llama, tmp_path):
    """Every state is the same here, and closest to the end-of-text token."""
    tensors = {name: torch.zeros_like(weight) for name, weight in weights(LLAMA).items()}
    tensors["model.embed_tokens.weight"][:, 0] = 1
    tensors["model.embed_tokens.weight"][1, 0] = 2
    tensors["model.norm.weight"][:] = 1
    folder = shutil.copytree(llama, tmp_path / "model")
    save_file(tensors, folder / "model.safetensors")
    generation = td.generate(import_model(folder, tmp_path / "run"), "green", tokens=9, temperature=0)
    assert (generation.text, len(generation.spending.depth)) == ("", 1)


def test_a_prompt_has_special_tokens_and_a_corpus_has_none(run):
    tokenizer = tokenizer_of(run)
    text = f"green{END}bottles"
    assert 1 in tokenizer.encode_prompt(text)
    assert 1 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_the_tokenizer_says_is_kept_and_sealed(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    run = import_model(folder, tmp_path / "run")
    tokenizer = tokenizer_of(run)
    assert isinstance(tokenizer, ImportedTokenizer)
    assert (tokenizer.begins, tokenizer.stops, tokenizer.chat_template) == ((), (1, 0), "{{ messages }}")
    (folder / "chat_template.jinja").write_text("{{ newer }}")
    assert tokenizer_of(import_model(folder, tmp_path / "newer")).chat_template == "{{ newer }}"
    edit_json(run.path / "tokenizer.json", chat_template="{{ other }}")
    with pytest.raises(td.UserError, match="is damaged"):
        tokenizer_of(run)


@pytest.mark.parametrize("change", [{"begins": [302]}, {"stops": "1"}, {"chat_template": 3}, {"more": 1}])
def test_a_tokenizer_of_another_form_is_refused(change):
    tree = {"kind": "imported", "tokenizer": json.loads(tokenizer_json()), "begins": [], "stops": [1]}
    tree |= {"chat_template": None}
    assert data.tokenizer_from_dict(tree).stops == (1,)
    with pytest.raises(td.UserError):
        data.tokenizer_from_dict({**tree, **change})


def test_routers_are_put_into_a_model_of_others(tmp_path, corpus):
    """Untrained and at full budget, the retrofitted model equals the original, including begin and end of text."""
    folder = write_llama(tmp_path / "model", begins=True)
    changes = {"train.steps": 2, "train.batch_size": 2, "train.lr": 0.0}
    options = {"corpus": corpus, "budget": 0.8, "begin": 1, "length": 1, "context": 32}
    routed = td.retrofit(folder, tmp_path / "routed", changes=changes, show=False, **options)
    base = td.Run.open(tmp_path / "routed-base")
    assert tokenizer_of(routed) == tokenizer_of(base)
    ids = torch.tensor([tokenizer_of(base).encode_prompt("seven green bottles")])
    full = td.load(routed, budget=1.0)
    torch.testing.assert_close(full(ids, execution="hard").logits, td.load(base)(ids).logits, rtol=0, atol=0)
    assert 0 < td.load(routed)(ids).trace.totals().active_fraction < 1
    with pytest.raises(td.UserError, match="without a corpus; name a text"):
        td.retrofit(folder, tmp_path / "other", show=False)
    with pytest.raises(td.UserError, match=r"character '\\ud800' at position 2 .*leave it out"):
        td.load(base)("ab\ud800")


def test_a_base_of_another_model_is_not_taken_for_the_one_that_is_named(tmp_path, corpus):
    """The folder next to --out was left by an earlier retrofit, or is a run of the user."""
    one, other = write_llama(tmp_path / "one"), write_llama(tmp_path / "other")
    save_file({name: 2 * weight for name, weight in weights(LLAMA).items()}, other / "model.safetensors")
    import_model(one, tmp_path / "run-base", corpus=corpus)
    with pytest.raises(td.UserError, match="run-base holds another model than "):
        td.retrofit(other, tmp_path / "run", corpus=corpus, context=32, show=False)
    changes = {"train.steps": 1, "train.batch_size": 2}
    assert td.retrofit(one, tmp_path / "run", corpus=corpus, context=32, changes=changes, show=False).finished


def test_windows_begin_as_texts_begin(tmp_path, corpus):
    """Every window starts with the begin-of-text token, which is never a target; all others are, once."""
    run = import_model(write_llama(tmp_path / "model", begins=True), tmp_path / "run", corpus=corpus)
    assert tokenizer_of(run).encode_prompt("green") == [0, *tokenizer_of(run).encode("green")]
    assert td.load(run)("green").logits.shape[1] == len(tokenizer_of(run).encode("green")) + 1
    dataset, context = dataset_of(run), run.config.model.context
    read, wanted = [], []
    for inputs, targets in batches(dataset, "val", context, torch.device("cpu")):
        assert inputs.shape[1] <= context
        assert (inputs[:, 0] == 0).all()
        assert (targets[:, 0] == NO_LOSS).all()
        read += inputs[:, 1:].flatten().tolist()
        wanted += targets[:, 1:].flatten().tolist()
    ids = dataset.split_ids("val").tolist()  # pyright: ignore[reportAttributeAccessIssue] - a text
    assert (read, wanted) == (ids[:-1], ids[1:])
    inputs, targets = dataset.train_batch(seed=0, step=0, batch_size=3, context=context)
    assert inputs.shape == (3, context)
    np.testing.assert_array_equal(inputs[:, 2:], targets[:, 1:-1])
    assert (targets[:, 0] == NO_LOSS).all()
    assert dataset.passage("val", context)[:2].tolist() == [0, ids[0]]
    figures = td.evaluate(run, timing=False, device="cpu")
    assert figures["tokens"] == len(ids) - 1 + -(-(len(ids) - 1) // (context - 1)), "and one for every window"
    model = td.load(run)
    losses = []
    for inputs, targets in batches(dataset, "val", context, torch.device("cpu")):
        logits = model(inputs).logits.log_softmax(-1)[:, 1:]
        losses += (-logits.gather(-1, targets[:, 1:, None])).flatten().tolist()
    assert figures["hard"]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    per_token = dataset.bytes_per_token("val")
    assert figures["hard"]["bits_per_byte"] == pytest.approx(figures["hard"]["loss"] / np.log(2) / per_token)


def test_a_run_is_measured_where_its_tokenizer_file_is_gone(tmp_path, corpus):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json())
    small = {"model.d_model": 16, "model.n_layer": 1, "model.n_head": 2, "model.d_ff": 16, "model.context": 16}
    tokens = {"data.corpus": corpus, "data.tokens": f"tokenizer:{path}"}
    run = td.train(td.recipe("demo.dense", {**small, **tokens, "train.steps": 1}), tmp_path / "run", show=False)
    before = td.evaluate(run, timing=False, device="cpu")
    path.unlink()
    after = td.evaluate(run, timing=False, device="cpu")
    assert before["hard"] == after["hard"]


@pytest.mark.parametrize("tokens", ["char", "byte", "bpe:300"])
def test_any_run_can_be_measured_on_another_text_in_its_own_tokens(tokens, tmp_path, corpus):
    small = {"model.d_model": 16, "model.n_layer": 1, "model.n_head": 2, "model.d_ff": 16, "model.context": 16}
    changes = {**small, "data.corpus": corpus, "data.tokens": tokens, "train.steps": 1}
    run = td.train(td.recipe("demo.dense", changes), tmp_path / "run", show=False)
    other = tmp_path / "other.txt"
    other.write_text("green bottles hanging on the wall\n" * 40)
    dataset = dataset_of(run, f"text:{other}")
    assert dataset.tokenizer == tokenizer_of(run)
    assert dataset.tokenizer.decode(dataset.passage("train", 16)).startswith("green")
    assert td.evaluate(run, corpus=f"text:{other}", timing=False)["tokens"] > 100 / 4
    assert run.evaluation is None
    if tokens == "char":
        other.write_text("red kettles\n" * 40)
        with pytest.raises(td.UserError, match="has the character 'k', which is none of the run's"):
            dataset_of(run, f"text:{other}")


def test_symbols_have_no_other_text(tmp_path, corpus):
    small = {"model.d_model": 16, "model.n_layer": 1, "model.n_head": 2, "model.d_ff": 16, "train.steps": 1}
    run = td.train(td.recipe("synthetic.copy_dense", small), tmp_path / "run", show=False)
    with pytest.raises(td.UserError, match="has the symbols of copy; drop it"):
        dataset_of(run, corpus)


# --- errors -----------------------------------------------------------------------------------------------------------


def damaged(folder: Path, how: str) -> Path:
    tensors = weights(LLAMA)
    file = folder / "model.safetensors"
    match how:
        case "nothing there":
            return folder / "nowhere"
        case "another kind of file":
            return folder / "config.json"
        case "a pickle for weights":
            file.rename(folder / "pytorch_model.bin")
        case "a pickle by name":
            file.rename(folder / "pytorch_model.bin")
            return folder / "pytorch_model.bin"
        case "no config":
            (folder / "config.json").unlink()
        case "a config that is no JSON":
            (folder / "config.json").write_text("{")
        case "a config that is a list":
            (folder / "config.json").write_text("[]")
        case "no weights":
            file.unlink()
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "a tokenizer that is none":
            (folder / "tokenizer.json").write_text("{}")
        case "half a file":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "a pointer of git":
            file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        case "a part is missing":
            write_shards(folder, tensors)
            (folder / "model-00002-of-00002.safetensors").unlink()
        case "half a part":
            write_shards(folder, tensors)
            os.truncate(folder / "model-00002-of-00002.safetensors", 1000)
        case "a part outside":
            write_shards(folder, tensors)
            edit_json(folder / "model.safetensors.index.json", weight_map={"x": "../model.safetensors"})
        case "an index of nothing":
            write_shards(folder, tensors)
            edit_json(folder / "model.safetensors.index.json", weight_map=None)
        case "a weight twice":
            write_shards(folder, tensors)
            save_file(tensors, folder / "model-00002-of-00002.safetensors")
        case "a weight too few":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "a weight too many":
            tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3)
        case "another shape":
            tensors["model.norm.weight"] = torch.ones(17)
        case "whole numbers":
            tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 16, dtype=torch.int8)
        case "not a number":
            tensors["model.norm.weight"][3] = torch.nan
        case "another head":
            tensors["lm_head.weight"] = torch.ones(304, 16)
        case "no head":
            edit_json(folder / "config.json", tie_word_embeddings=False)
        case "more tokens than the model":
            edit_json(folder / "config.json", vocab_size=300)
            tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300].clone()
        case "tokens after every text":
            tree = json.loads(tokenizer_json())
            post = {"type": "BertProcessing", "sep": [END, 1], "cls": [BEGIN, 0]}
            (folder / "tokenizer.json").write_text(json.dumps({**tree, "post_processor": post}))
    if file.exists() and how not in ("half a file", "a pointer of git"):
        save_file(tensors, file)
    return folder


REFUSED = {
    "nothing there": "nowhere: no such folder or file; name a folder with config.json, or a GGUF file; download it",
    "another kind of file": "config.json is not a GGUF file; name one, or the folder",
    "a pickle for weights": "pytorch_model.bin is a pickle, which may run any code when it is read; take the model's",
    "a pickle by name": "pytorch_model.bin is a pickle, which may run any code when it is read; take the model's",
    "no config": "is not a model of Hugging Face: it has no config.json",
    "a config that is no JSON": "config.json is damaged",
    "a config that is a list": "config.json is not a JSON object; download it again",
    "no weights": "has no weights: neither model.safetensors nor model.safetensors.index.json; download it again",
    "no tokenizer": "has no tokenizer.json; download it again with it",
    "a tokenizer that is none": "its tokenizer is not a tokenizer.json of Hugging Face: it has no model; download it",
    "half a file": "model.safetensors is damaged or not whole",
    "a pointer of git": "model.safetensors is damaged or not whole",
    "a part is missing": "model-00002-of-00002.safetensors is missing, and model.safetensors.index.json names it",
    "half a part": "model-00002-of-00002.safetensors is damaged or not whole",
    "a part outside": "names '../model.safetensors'; expected a .safetensors file in the same folder",
    "an index of nothing": "model.safetensors.index.json is damaged: it has no weight_map",
    "a weight twice": "is in two files, model-00002-of-00002.safetensors and another",
    "a weight too few": "its weight model.layers.1.mlp.up_proj.weight is missing",
    "a weight too many": "a weight that its config.json does not explain: model.layers.2.mlp.up_proj.weight",
    "another shape": "its weight model.norm.weight is of shape [17]; expected [16]",
    "whole numbers": "its weight model.layers.0.mlp.up_proj.weight has numbers of type I8; take the unquantised",
    "not a number": "its weight model.norm.weight has numbers that are not finite",
    "another head": "its lm_head.weight is not the embedding, though tie_word_embeddings says so",
    "no head": "its weight lm_head.weight is missing",
    "more tokens than the model": "its tokenizer has 302 tokens, more than the 300 of the model",
    "tokens after every text": "its tokenizer puts tokens after every text",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_imported_is_refused_in_one_line(how, llama, tmp_path):
    path = damaged(shutil.copytree(llama, tmp_path / "model"), how)
    with pytest.raises(td.UserError) as error:
        import_model(path, tmp_path / "run")
    assert REFUSED[how] in one_line(error.value)
    assert not (tmp_path / "run").exists(), "and nothing is left behind"


def test_what_checkpoints_hold_twice_is_taken(llama, run, tmp_path):
    tensors = weights(LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    folder = shutil.copytree(llama, tmp_path / "model")
    save_file(tensors, folder / "model.safetensors")
    assert import_model(folder, tmp_path / "run").fingerprint == run.fingerprint


def test_a_folder_that_is_taken_is_left_alone(llama, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(td.UserError, match="is there already; name a new folder"):
        import_model(llama, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full disk", "Ctrl-C"])
def test_what_is_not_written_whole_is_not_there(error, llama, tmp_path, monkeypatch):
    def stopped(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "replace_bytes", stopped)  # while writing the weights, after the small files
        with pytest.raises((td.UserError, KeyboardInterrupt)):
            import_model(llama, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    assert import_model(llama, tmp_path / "run").finished, "into an empty folder"


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(td.UserError, match=r"needs the package gguf, not installed; pip install 'tokendepth\[hf\]'"):
        import_model(file, tmp_path / "run")


def test_a_run_that_has_more_tokens_than_the_tokenizer_may_be_made(tmp_path, corpus):
    config = td.recipe("demo.dense", {"data.corpus": corpus, "model.context": 16, "train.steps": 1})
    small = replace(config.model, d_model=16, n_layer=1, n_head=2, d_ff=16, vocab_size=100)
    run = td.train(replace(config, model=small), tmp_path / "run", show=False)
    assert run.config.model.vocab_size == 100
    assert td.load(run)("green").logits.shape[-1] == 100
