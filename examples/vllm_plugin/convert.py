"""Convert a Token-Selective Attention run to a folder for vLLM with the plugin: python convert.py RUN FOLDER

The run must be trained with `--method.skip ffn` and Llama-style blocks: RMSNorm, rotary positions, SwiGLU, no biases,
no norm of queries and keys.
"""

import argparse
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

import tokendepth as td
from tokendepth.hf.tokenizer import fast_tokenizer
from tokendepth.methods.tsa import TSA


def llama_weights(network) -> dict[str, Tensor]:
    """Weights under their names in Llama; routers keep their own names."""
    model, native = network.config, network.state_dict()
    q, kv = model.n_head * model.width, model.kv_heads * model.width
    found = {"model.embed_tokens.weight": native["embedding.weight"], "model.norm.weight": native["norm.weight"]}
    if not model.tie_head:
        found["lm_head.weight"] = native["head.weight"]
    for layer in range(model.n_layer):
        old, new = f"method.blocks.{layer}", f"model.layers.{layer}"
        for name, part in zip("qkv", native[f"{old}.attention.qkv.weight"].split([q, kv, kv]), strict=True):
            found[f"{new}.self_attn.{name}_proj.weight"] = part
        found[f"{new}.self_attn.o_proj.weight"] = native[f"{old}.attention.out.weight"]
        gate, up = native[f"{old}.ffn.gate_up.weight"].chunk(2)
        found |= {f"{new}.mlp.gate_proj.weight": gate, f"{new}.mlp.up_proj.weight": up}
        found[f"{new}.mlp.down_proj.weight"] = native[f"{old}.ffn.down.weight"]
        found[f"{new}.input_layernorm.weight"] = native[f"{old}.norm_attention.weight"]
        found[f"{new}.post_attention_layernorm.weight"] = native[f"{old}.norm_ffn.weight"]
        routers = [name for name in native if name.startswith(f"{old}.router.")]
        found |= {name.replace(old, new): native[name] for name in routers}
    return found


def convert(run: str, out: Path) -> None:
    loaded = td.load(run, device="cpu")
    model, method = loaded.network.config, loaded.network.method
    llama = (model.norm, model.positions, model.ffn, model.attention_bias, model.ffn_bias, model.qk_norm)
    if (
        llama != ("rms", "rotary", "swiglu", "none", False, False)
        or not isinstance(method, TSA)
        or method.skip != "ffn"
    ):
        raise td.UserError(f"{run} has no Llama-style blocks with --method.skip ffn; train one as in README.md")
    config = LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.d_model, intermediate_size=model.d_ff,
        num_hidden_layers=model.n_layer, num_attention_heads=model.n_head, num_key_value_heads=model.kv_heads,
        head_dim=model.width, max_position_embeddings=model.context, rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_head, rope_parameters={"rope_type": "default", "rope_theta": model.rope_base},
        architectures=["RoutedLlamaForCausalLM"], dtype="float32", bos_token_id=None, eos_token_id=None,
        router_hidden=method.routers()[0].hidden.out_features, router_threshold_logit=method.threshold_logit,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    fast_tokenizer(loaded.tokenizer, model.context).save_pretrained(out)
    weights = {name: weight.contiguous() for name, weight in llama_weights(loaded.network).items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    convert(options.run, options.out)
