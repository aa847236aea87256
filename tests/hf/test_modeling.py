"""TokenDepthForCausalLM equals the native model in weights and logits, and rejects files that do not fit."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.hf.samples import EVERY, pair, run_config, tokens
from tests.tiny import edit_json, one_line
from tokendepth.errors import UserError
from tokendepth.hf import TokenDepthConfig, TokenDepthForCausalLM
from tokendepth.methods import build
from tokendepth.trace import EXECUTIONS

each_case = pytest.mark.parametrize("case", EVERY)


@each_case
def test_it_begins_with_the_native_weights(case):
    config = TokenDepthConfig.of(run_config(case, seed=4))
    wanted, before = build(run_config(case, seed=4)).state_dict(), torch.get_rng_state()
    made = [TokenDepthForCausalLM(config), AutoModelForCausalLM.from_config(config)]
    assert torch.equal(torch.get_rng_state(), before)
    for model in made:
        assert all(torch.equal(model.model.state_dict()[name], weight) for name, weight in wanted.items())


@each_case
@torch.no_grad()
def test_saved_in_shards_and_loaded_it_computes_to_the_bit_what_the_native_model_does(case, tmp_path):
    native, model = pair(case)
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), tokens(3)
    assert type(loaded) is TokenDepthForCausalLM
    assert not loaded.training
    for execution in EXECUTIONS:
        loaded.config.execution = execution
        out, wanted = loaded(ids, output_depth=True), native(ids, execution=execution)
        assert torch.equal(out.logits, wanted.logits)
        assert torch.equal(out.depth.work, wanted.trace.work)
    assert torch.equal(loaded(ids, logits_to_keep=1).logits, loaded(ids).logits[:, -1:])
    (logits,) = loaded(ids, return_dict=False)
    assert torch.equal(logits, wanted.logits)


@each_case
@torch.no_grad()
def test_padding_on_either_side_changes_no_token(case):
    native, model = pair(case)
    ids = tokens(2, 9, seed=1)
    padded = torch.nn.functional.pad(ids, (3, 2), value=99)
    out = model(padded, attention_mask=(padded != 99).long())
    wanted = native(ids, execution="sparse").logits
    assert float((out.logits[:, 3:-2] - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, wanted), "a mask of ones is none"


@each_case
def test_what_is_not_rounded_stays_exact_in_bfloat16(case, tmp_path):
    """Mainly thresholds: rounding one changes decisions."""
    native, model = pair(case)
    for buffer in model.model.buffers():
        if buffer.is_floating_point():
            buffer += 1 / 3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    for (name, buffer), (_, own) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        if name.endswith((".frequencies", ".skipping", ".told")):  # not saved but recomputed
            buffer = native.get_buffer(name.removeprefix("model."))
        assert torch.equal(own, buffer), name
    with torch.no_grad():
        assert loaded(tokens(2)).logits.isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once(tied, tmp_path):
    config = replace(run_config("dense"), model=replace(run_config("dense").model, tie_head=tied))
    TokenDepthForCausalLM(TokenDepthConfig.of(config)).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.shape == (11, 32) for tensor in stored.values()) == 2 - tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, build(config).embedding.weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 missing tensors, such as model.norm.weight"),
        (
            lambda w: w.pop("model.method.blocks.1.threshold"),
            "1 missing tensors, such as model.method.blocks.1.threshold",
        ),
        (lambda w: w.update(extra=torch.zeros(1)), "1 unexpected tensors, such as extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(31)}), "1 mismatched tensors, such as model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, said, tmp_path):
    _, model = pair("budget")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(UserError) as error:
            AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert said in one_line(error.value)
        assert str(tmp_path) in str(error.value)


def test_another_execution_is_asked_for_when_it_is_loaded_or_later(tmp_path):
    native, model = pair("tsa")
    model.save_pretrained(tmp_path)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path, execution="soft"), tokens(2)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, native(ids, execution="soft").logits)
    loaded.config.execution = "fast"
    with pytest.raises(UserError, match=r"config\.execution is 'fast'; expected one of soft, hard, sparse"):
        loaded(ids)


def test_quantised_weights_are_refused(tmp_path):
    pair("dense")[1].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="quantization_config is given"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config={"quant_method": "bitsandbytes"})


def test_a_vocabulary_is_needed_and_stays_as_it_is():
    with pytest.raises(UserError, match=r"model\.vocab_size is 0"):
        TokenDepthForCausalLM(TokenDepthConfig())
    _, model = pair("dense")
    with pytest.raises(UserError, match="vocabulary of this model is fixed"):
        model.resize_token_embeddings(12)


LOAD = """
import sys
{first}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__name__, type(model).__module__)
model.save_pretrained(sys.argv[1] + "-again")
"""


def load_elsewhere(folder, first: str = "") -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", LOAD.format(first=first), str(folder)]
    return subprocess.run(code, capture_output=True, text=True)


@pytest.mark.slow
def test_a_folder_names_the_package_it_needs(tmp_path):
    """Without importing tokendepth.hf. Saving again gives the same folder, and none of our code is copied."""
    _, model = pair("tsa")
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    done = load_elsewhere(folder)
    assert done.stdout.split() == ["TokenDepthForCausalLM", "tokendepth.hf.modeling"], done.stderr
    files = [{path.name: path.read_bytes() for path in f.iterdir()} for f in (folder, tmp_path / "saved-again")]
    assert files[0] == files[1]
    missing = load_elsewhere(folder, "sys.modules['tokendepth'] = None")
    assert missing.returncode != 0
    (said,) = [line for line in missing.stderr.splitlines() if line.startswith("ImportError")]
    assert "this model needs the package tokendepth: pip install 'tokendepth[hf]'" in said


@pytest.mark.slow
def test_without_transformers_the_extra_is_named():
    code = "import sys; sys.modules['transformers'] = None; import tokendepth.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'tokendepth[hf]'" in done.stderr.splitlines()[-1]


def test_config_and_weights_of_different_models_do_not_mix(tmp_path):
    _, model = pair("tsa")
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", method={"name": "dense"})
    with pytest.raises(UserError, match="unexpected tensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
