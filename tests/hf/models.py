"""Tiny Hugging Face model folders, written without transformers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import TEXT
from tokendepth.data.bpe import train_bpe

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 304,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BEGIN, END = "<s>", "</s>"


@cache
def tokenizer_json() -> str:
    """Byte-level BPE with 302 tokens, two fewer than the model; the first two are special."""
    tree = json.loads(train_bpe([TEXT], 300).text)
    special = {BEGIN: 0, END: 1}
    tree["model"]["vocab"] = special | {name: token + 2 for name, token in tree["model"]["vocab"].items()}
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tree["added_tokens"] = [{"id": token, "content": name, **common} for name, token in special.items()]
    return json.dumps(tree)


def beginning(tree: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, but it prepends the first token to every text."""
    template = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {BEGIN: {"id": BEGIN, "ids": [0], "tokens": [BEGIN]}}
    post = {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}
    return {**tree, "post_processor": post}


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights in bfloat16, like most checkpoints."""
    dice = torch.Generator().manual_seed(0)
    d, ff, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"] * d // heads
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    for n in range(config["num_hidden_layers"]):
        inside = {
            "input_layernorm": (d,), "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d), "post_attention_layernorm": (d,),
            "mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff),
        }  # fmt: skip
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in inside.items()}
    return {name: (torch.randn(shape, generator=dice) / 4).bfloat16() for name, shape in shapes.items()}


def write_llama(folder: Path, *, begins: bool = False, **changes: Any) -> Path:
    """A tiny Llama with its tokenizer; `changes` to its config.json, where None removes a key."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tree = json.loads(tokenizer_json())
    (folder / "tokenizer.json").write_text(json.dumps(beginning(tree) if begins else tree))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file(weights(CONFIG), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write two shards and their index."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
