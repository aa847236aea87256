"""Imported models have the logits of transformers: tiny random models of every family, a trained one, a GGUF file.

The tolerance is measured. transformers has two implementations of attention, `eager` and `sdpa`; ours may have twice
the larger one of their errors in float32, relative to the same model in float64.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tokendepth as td
from tests.hf.models import END, beginning, tokenizer_json
from tests.tiny import TEXT, one_line
from tokendepth.cache import KVCache
from tokendepth.data.imported import ImportedTokenizer
from tokendepth.data.of_run import tokenizer_of
from tokendepth.errors import UserError
from tokendepth.importing.convert import import_model
from tokendepth.importing.families import model_config
from tokendepth.measure.evaluate import load_model
from tokendepth.model import LanguageModel

if missing := [name for name in ("transformers", "gguf") if find_spec(name) is None]:
    pytest.skip(f"no {missing[0]}: pip install 'tokendepth[hf]'", allow_module_level=True)

import gguf
import transformers

pytestmark = pytest.mark.xdist_group("transformers")

STORIES = Path(os.environ.get("TOKENDEPTH_DATA") or Path(__file__).parents[3] / "shared" / "data") / "stories260K"
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 304,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = {"rope_theta": 1e4, "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama, tied, with biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama3": ("Llama", {"rope_parameters": {**LLAMA3, **SHORT}}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **SHORT}}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
}


@torch.no_grad()
def lively(name: str):
    """A transformers model in which every weight matters; by default, norms and biases start without an effect."""
    prefix, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.2)
        else:
            weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A function from a family to its transformers model and the imported one."""
    made = {}

    def of(name: str):
        if name not in made:
            folder, model = tmp_path_factory.mktemp("model"), lively(name)
            model.save_pretrained(folder)
            (folder / "tokenizer.json").write_text(tokenizer_json())
            made[name] = model, load_model(import_model(folder, folder / "run"), CPU)
        return made[name]

    return of


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, time), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def of_transformers(model, **inputs) -> tuple[Tensor, list[Tensor]]:
    """Logits in float64, and in float32 with both implementations."""
    rounded = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        rounded.append(model(**inputs).logits)
    exact = model.double()(**inputs).logits
    model.float()
    return exact, rounded


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def allowed(exact: Tensor, rounded: list[Tensor]) -> float:
    return 2 * max(error(logits, exact) for logits in rounded)


@torch.no_grad()
def decoded(model: LanguageModel, ids: Tensor) -> Tensor:
    """Logits from decoding ids one at a time."""
    cache = KVCache(model.config, len(ids), ids.shape[1], layers=model.method.cache_layers, like=model.norm.weight)
    return torch.cat([model(part, execution="sparse", cache=cache).logits for part in ids.split(1, 1)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, pair):
    model, imported = pair(family)
    ids = tokens(4, 48)
    exact, rounded = of_transformers(model, input_ids=ids)
    assert exact.std() > 0.3, "else there is nothing to compare"
    with torch.no_grad():
        for execution in ("hard", "sparse"):
            assert error(imported(ids, execution=execution).logits, exact) <= allowed(exact, rounded)
    assert error(decoded(imported, ids), exact) <= allowed(exact, rounded)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"])
def test_a_config_with_every_key_that_transformers_has_is_understood(name):
    """As in the config of a GGUF file."""
    config = getattr(transformers, f"{name}Config")()
    assert model_config(config.to_dict(), context=2048).n_layer == config.num_hidden_layers


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_padding_on_the_left_is_that_of_transformers(family, pair):
    model, imported = pair(family)
    ids, lengths = tokens(4, 32), torch.tensor([32, 20, 5, 1])
    valid = torch.arange(32) >= 32 - lengths[:, None]
    places = (valid.long().cumsum(1) - 1).clamp(min=0)
    exact, rounded = of_transformers(model, input_ids=ids, attention_mask=valid.long(), position_ids=places)
    with torch.no_grad():
        found = imported(ids, execution="sparse", valid=valid).logits
    assert error(found[valid], exact[valid]) <= allowed(exact[valid], [logits[valid] for logits in rounded])


def test_the_tolerance_tells_another_model(pair):
    """It fails if one of 20,000 weights is off by a thousandth."""
    model, imported = pair("llama")
    ids = tokens(4, 48)
    exact, rounded = of_transformers(model, input_ids=ids)
    weight = imported.method.blocks[1].ffn.down.weight
    with torch.no_grad():
        weight.mul_(1.001)
        found = imported(ids, execution="sparse").logits
        weight.div_(1.001)
    assert error(found, exact) > 10 * allowed(exact, rounded)


# --- a trained model and its tokenizer --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    if not (STORIES / "model.safetensors").is_file():
        pytest.skip("no stories260K: set TOKENDEPTH_DATA to a folder that has it")
    return import_model(STORIES, tmp_path_factory.mktemp("stories") / "run")


def test_a_trained_model_writes_the_same_story(stories):
    prompt = "Once upon a time, there was a"
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    given = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**given, max_new_tokens=150, do_sample=False)[0, given.input_ids.shape[1] :]
    expected = tokenizer_of(stories).decode(ids[ids != 2].tolist())
    written = td.generate(stories, prompt, tokens=150, temperature=0, device="cpu").text
    assert written.strip() == expected.strip()
    assert len(written) > 200


@pytest.mark.parametrize(
    "text", ["Once upon a time", " two  spaces\nand a line", "naïve “日本” 🙂", "a</s>b", "", TEXT]
)
def test_prompts_are_the_ids_of_transformers(text, stories):
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
    assert tokenizer_of(stories).encode_prompt(text) == tokenizer(text).input_ids


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_a_beginning_is_that_of_transformers(begins, add_bos_token, tmp_path, pair):
    """tokenizer.json takes precedence over tokenizer_config.json."""
    folder = tmp_path / "model"
    pair("llama")[0].save_pretrained(folder)
    tree = json.loads(tokenizer_json())
    (folder / "tokenizer.json").write_text(json.dumps(beginning(tree) if begins else tree))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": END}
    settings |= {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_of(import_model(folder, tmp_path / "run"))
    assert tokenizer.begins == ((0,) if begins else ())
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("green bottles", f"green{END}bottles", ""):
        assert tokenizer.encode_prompt(text) == expected(text).input_ids


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    """A tiny Llama with matrices quantised to 8 bits, in the layout of llama.cpp."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(SIZES["vocab_size"] - 2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    tree = json.loads(tokenizer_json())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tree["vocab"]))
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tree["vocab"]) - 2))
    writer.add_token_merges([" ".join(pair) for pair in tree["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    dice = np.random.default_rng(0)
    shapes = {"token_embd": (302, 64), "output_norm": (64,), "output": (302, 64)}
    for n in range(2):
        inside = {
            "attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
            "ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96),
        }  # fmt: skip
        shapes |= {f"blk.{n}.{name}": shape for name, shape in inside.items()}
    for name, shape in shapes.items():
        weight = dice.normal(0, 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", 1 + weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_a_gguf_file_is_what_transformers_makes_of_it(gguf_file, tmp_path, capfd):
    run = import_model(gguf_file, tmp_path / "run")
    assert capfd.readouterr().err == ""
    read = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    model = transformers.LlamaForCausalLM(read.config).eval()  # the same model, which transformers can run in float64
    model.load_state_dict(read.state_dict())
    ids = tokens(4, 48) % 302
    exact, rounded = of_transformers(model, input_ids=ids)
    with torch.no_grad():
        assert error(load_model(run, CPU)(ids, execution="sparse").logits, exact) <= allowed(exact, rounded)
    tokenizer = tokenizer_of(run)
    assert isinstance(tokenizer, ImportedTokenizer)
    assert (tokenizer.stops, tokenizer.chat_template) == ((1,), "{{ messages }}")
    expected = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert tokenizer.encode_prompt("green bottles") == expected("green bottles").input_ids
    assert run.env["imported_from"] == "tiny.gguf"


@pytest.mark.slow
def test_half_a_gguf_file_is_refused_in_one_line(gguf_file, tmp_path):
    half = tmp_path / "half.gguf"
    half.write_bytes(gguf_file.read_bytes()[:5000])
    with pytest.raises(UserError) as refused:
        import_model(half, tmp_path / "run")
    assert "half.gguf" in one_line(refused.value)
    assert "download it again" in str(refused.value)
