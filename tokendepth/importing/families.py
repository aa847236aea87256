"""Map a Hugging Face config.json to a model in our layers: its shape, and where each weight goes.

Llama, Mistral, Qwen2, Qwen3 and Gemma share one block with small differences, listed in `FAMILIES`. Every key of a
config.json is either used here, known not to affect the logits (`HARMLESS`), or rejected: an unknown key may mean an
architecture that we would compute wrongly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokendepth.config import ModelConfig
from tokendepth.errors import UserError

Value = TypeVar("Value", int, float, str, bool)
Take = Callable[[str, tuple[int, ...]], Tensor]
"""Reads the weight of this name and shape from the checkpoint."""


@dataclass(frozen=True)
class Family:
    """How a model family differs from Llama."""

    tied: bool = False
    """Default for a head tied to the embedding, if config.json does not set it."""
    head_width: int | None = None
    """Default width of a head, if not set; None: model width / heads."""
    bias: bool = False
    """Whether query, key and value projections always have a bias."""
    qk_norm: bool = False
    window: int | None = None
    """Default sliding window, if not set; None: no window."""
    gemma: bool = False
    """GELU gating, embeddings multiplied by the root of the width, norms that scale by 1 + weight."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=4096),
    "qwen2": Family(bias=True),
    "qwen3": Family(head_width=128, qk_norm=True),
    "gemma": Family(tied=True, head_width=256, gemma=True),
}
"""By `model_type`. SmolLM and SmolLM2 are Llamas."""

MISSING = {
    "gemma2": "norms after each sub-layer, soft caps on logits and local windows",
    "gemma3": "norms after each sub-layer and local windows",
    "gemma3_text": "norms after each sub-layer and local windows",
    "smollm3": "layers without positions",
    "olmo2": "norms after each sub-layer",
    "phi3": "packed projections",
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
}
"""Well-known families that need something our block does not have."""

HARMLESS = {
    # origin and training
    "_from_model_config", "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout", "dtype",
    "initializer_range", "is_llama_config", "pretraining_tp", "tokenizer_class", "torch_dtype", "transformers_version",
    "transformers.js_config", "unsloth_fixed",
    # use of the outputs
    "bos_token_id", "chunk_size_feed_forward", "eos_token_id", "id2label", "is_decoder", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "unk_token_id",
    "use_cache",
}  # fmt: skip
FIXED = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None, {}),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (None, False),
}
"""Values that match our layers; any other changes the computation."""

SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


class Keys:
    """Reads a JSON object key by key with type checks; `end` rejects keys left over."""

    def __init__(self, tree: dict[str, Any], part: str = "") -> None:
        self.left, self.part = dict(tree), part

    def take(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Raises UserError if the value has another type, or is missing and has no default."""
        found = self.optional(name, kind, default)
        if found is None:
            raise UserError(f"it does not say its {self.part}{name}")
        return found

    def optional(self, name: str, kind: type[Value], default: Value | None = None) -> Value | None:
        value: Any = self.left.pop(name, None)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"its {self.part}{name} is {value!r:.60}; expected {kind.__name__}")
        return value

    def allow(self, name: str, *values: Any) -> None:
        """Reject any value but these, if the key is present."""
        if name in self.left and (value := self.left.pop(name)) not in values:
            raise UserError(f"its {self.part}{name} is {value!r:.60}, which tokendepth cannot compute")

    def end(self, harmless: set[str] = frozenset()) -> None:  # pyright: ignore[reportArgumentType]
        for name in self.left:
            if name not in harmless:
                raise UserError(f"its {self.part}{name} is unknown and may change what the model computes")


def family_of(tree: dict[str, Any]) -> str:
    """The `model_type`; UserError if it cannot be imported."""
    name, classes = tree.get("model_type"), tree.get("architectures") or []
    if tree.get("quantization_config"):
        kind = tree["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"its weights are quantised ({kind}); take the unquantised checkpoint, or a GGUF file of it")
    if name in MISSING:
        raise UserError(f"its model_type is {name!r}, which needs what tokendepth does not have: {MISSING[name]}")
    if name not in FAMILIES:
        encodes = tree.get("is_encoder_decoder") or any(str(c).endswith(("MaskedLM", "PreTraining")) for c in classes)
        what = "not a decoder-only language model" if encodes else "not supported"
        raise UserError(f"its model_type is {name!r}: {what}; expected one of {', '.join(FAMILIES)}")
    if classes and not any(str(c).endswith("ForCausalLM") for c in classes):
        raise UserError(f"its architecture is {classes[0]}; expected a model with a language head, as ...ForCausalLM")
    return name


def model_config(tree: dict[str, Any], context: int | None = None) -> ModelConfig:
    """The shape described by a config.json; `context` may shorten the model's."""
    name = family_of(tree)
    family, keys = FAMILIES[name], Keys(tree)
    keys.left.pop("model_type")
    for key, values in FIXED.items():
        keys.allow(key, *values)
    d_model, heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    longest = keys.take("max_position_embeddings", int)
    if context is not None and not 2 <= context <= longest:
        raise UserError(f"its context is {longest}, and --context is {context}; expected 2 to {longest}")
    context = context or longest
    _check_window(keys, family, context)
    activations = ("gelu", "gelu_pytorch_tanh") if family.gemma else ("silu",)
    keys.allow("hidden_act", *activations)
    if family.gemma:
        keys.allow("hidden_activation", None, *activations)
    biased = keys.take("attention_bias", bool, False) if name in ("llama", "qwen3", "gemma") else False
    shape: dict[str, Any] = {
        "d_model": d_model,
        "n_layer": keys.take("num_hidden_layers", int),
        "n_head": heads,
        "d_ff": keys.take("intermediate_size", int),
        "context": context,
        "dropout": 0.0,
        "vocab_size": keys.take("vocab_size", int),
        "norm": "rms",
        "norm_eps": keys.take("rms_norm_eps", float, 1e-6),
        "positions": "rotary",
        "n_kv_head": keys.take("num_key_value_heads", int, heads),
        "head_width": keys.take("head_dim", int, family.head_width or d_model // max(heads, 1)),
        "attention_bias": "qkv" if family.bias else "all" if biased else "none",
        "qk_norm": family.qk_norm,
        "ffn": "geglu" if family.gemma else "swiglu",
        "ffn_bias": keys.take("mlp_bias", bool, False) if name == "llama" else False,
        "tie_head": keys.take("tie_word_embeddings", bool, family.tied),
        "embedding_scale": math.sqrt(d_model) if family.gemma else 1.0,
        **_rotation(keys, longest),
    }
    keys.end(HARMLESS)
    try:
        return ModelConfig(**shape)
    except UserError as error:
        raise UserError(f"it describes a model that tokendepth does not have ({error})") from None


def _check_window(keys: Keys, family: Family, context: int) -> None:
    """A sliding window no shorter than the context has no effect; reject others."""
    uses = keys.take("use_sliding_window", bool, family.window is not None)
    window = keys.left.pop("sliding_window", family.window)
    keys.left.pop("max_window_layers", None)
    kinds = keys.left.pop("layer_types", None) or []
    if other := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise UserError(f"its layer_types has {min(other)!r}, which tokendepth does not have")
    if kinds:
        uses = "sliding_attention" in kinds
    if uses and window is not None and context > window:
        raise UserError(
            f"its layers see a sliding window of {window} tokens, which tokendepth does not have, and its context is "
            f"{context}; import it with --context {window} or less"
        )


def _rotation(keys: Keys, longest: int) -> dict[str, Any]:
    """Rotary position options in the format of transformers 5 (`rope_parameters`) or 4."""
    base = keys.take("rope_theta", float, 10_000.0)
    found = [part for name in ("rope_scaling", "rope_parameters") if (part := keys.left.pop(name, None))]
    if not all(isinstance(part, dict) and part == found[0] for part in found):
        raise UserError(f"its rope_scaling and rope_parameters contradict each other ({found!r:.80})")
    rope = Keys(found[0] if found else {}, "rope_parameters.")
    base = rope.take("rope_theta", float, base)
    kind = rope.optional("rope_type", str) or rope.left.get("type", "default")
    rope.allow("type", kind)
    if kind not in SCALINGS:
        raise UserError(f"its rope_parameters.rope_type is {kind!r}; expected one of {', '.join(SCALINGS)}")
    rope.allow("partial_rotary_factor", None, 1, 1.0)
    shape: dict[str, Any] = {"rope_base": base, "rope_scaling": SCALINGS[kind]}
    if kind != "default":
        shape["rope_factor"] = rope.take("factor", float)
    if kind in ("llama3", "yarn"):
        original = keys.optional("original_max_position_embeddings", int)
        inside = rope.take("original_max_position_embeddings", int, longest)
        shape["rope_original_context"] = original or inside
    if kind == "llama3":
        shape |= {"rope_low": rope.take("low_freq_factor", float), "rope_high": rope.take("high_freq_factor", float)}
    if kind == "yarn":
        shape |= {"rope_low": rope.take("beta_slow", float, 1.0), "rope_high": rope.take("beta_fast", float, 32.0)}
        rope.allow("attention_factor", None, 0.1 * math.log(shape["rope_factor"]) + 1.0)
        rope.allow("truncate", None, True)
        for name in ("mscale", "mscale_all_dim"):
            rope.allow(name, None, 0, 0.0)
    rope.end()
    return shape


def native_weights(name: str, model: ModelConfig, take: Take) -> dict[str, Tensor]:
    """All weights of the dense model, by their names in tokendepth."""
    d, ff, q, kv = model.d_model, model.d_ff, model.n_head * model.width, model.kv_heads * model.width

    def norm(old: str, width: int = d) -> Tensor:
        return take(f"{old}.weight", (width,)) + (1.0 if FAMILIES[name].gemma else 0.0)

    def linear(new: str, old: list[str], rows: list[int], columns: int, *, bias: bool) -> dict[str, Tensor]:
        """Projections of the same input are concatenated into one matrix here."""
        parts = list(zip(old, rows, strict=True))
        found = {f"{new}.weight": torch.cat([take(f"{part}.weight", (n, columns)) for part, n in parts])}
        if bias:
            found[f"{new}.bias"] = torch.cat([take(f"{part}.bias", (n,)) for part, n in parts])
        return found

    weights = {"embedding.weight": take("model.embed_tokens.weight", (model.vocab_size, d))}
    for layer in range(model.n_layer):
        new, old = f"method.blocks.{layer}", f"model.layers.{layer}"
        projections = [f"{old}.self_attn.{part}_proj" for part in "qkv"]
        some, every = model.attention_bias != "none", model.attention_bias == "all"
        weights[f"{new}.norm_attention.weight"] = norm(f"{old}.input_layernorm")
        weights |= linear(f"{new}.attention.qkv", projections, [q, kv, kv], d, bias=some)
        weights |= linear(f"{new}.attention.out", [f"{old}.self_attn.o_proj"], [d], q, bias=every)
        if model.qk_norm:
            for part in "qk":
                weights[f"{new}.attention.norm_{part}.weight"] = norm(f"{old}.self_attn.{part}_norm", model.width)
        weights[f"{new}.norm_ffn.weight"] = norm(f"{old}.post_attention_layernorm")
        gates = [f"{old}.mlp.gate_proj", f"{old}.mlp.up_proj"]
        weights |= linear(f"{new}.ffn.gate_up", gates, [ff, ff], d, bias=model.ffn_bias)
        weights |= linear(f"{new}.ffn.down", [f"{old}.mlp.down_proj"], [d], ff, bias=model.ffn_bias)
    weights["norm.weight"] = norm("model.norm")
    if not model.tie_head:
        weights["head.weight"] = take("lm_head.weight", (model.vocab_size, d))
    return weights
