"""From config.json to a shape; configs with unknown keys or values are rejected."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.hf.models import CONFIG
from tests.tiny import one_line
from tokendepth.config import ModelConfig
from tokendepth.errors import UserError
from tokendepth.importing.families import HARMLESS, model_config


def tree(**changes: Any) -> dict[str, Any]:
    """The tiny Llama with some keys changed, or with None removed."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}


PLAIN = ModelConfig(
    d_model=16, n_layer=2, n_head=4, d_ff=24, context=64, dropout=0.0, vocab_size=304, norm="rms", norm_eps=1e-5,
    positions="rotary", n_kv_head=2, head_width=4, ffn="swiglu", ffn_bias=False,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN3 = {"model_type": "qwen3", "architectures": None, "head_dim": 8}
GEMMA = {"model_type": "gemma", "architectures": None, "head_dim": 8, "tie_word_embeddings": None}

TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "of transformers 5": ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, {"rope_base": 5e5}),
    "both ways": ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 7.0},
                  {"rope_scaling": "linear", "rope_factor": 2.0, "rope_base": 7.0}),
    "all heads": ({"num_key_value_heads": None}, {"n_kv_head": 4}),
    "not tied": ({"tie_word_embeddings": None}, {"tie_head": False}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {"attention_bias": "all", "ffn_bias": True}),
    "llama3": ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}},
               {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 16, "rope_high": 4.0}),
    "llama3 of its own context": ({"rope_scaling": LLAMA3}, {"rope_scaling": "llama3", "rope_factor": 8.0,
                                                            "rope_original_context": 64, "rope_high": 4.0}),
    "yarn": ({"rope_scaling": YARN}, {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 32,
                                      "rope_high": 32.0}),
    "mistral without a window": ({"model_type": "mistral", "sliding_window": 64}, {}),
    "qwen2": ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
              {"attention_bias": "qkv"}),
    "qwen3": (QWEN3, {"head_width": 8, "qk_norm": True}),
    "gemma": ({**GEMMA, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
              {"head_width": 8, "ffn": "geglu", "embedding_scale": 4.0}),
    "what does no harm": (dict.fromkeys(HARMLESS - {"architectures"}, 1), {}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), TAKEN.values(), ids=TAKEN)
def test_what_is_taken(changes, expected):
    assert model_config(tree(**changes)) == replace(PLAIN, **expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"model_type": "gpt2"}, "its model_type is 'gpt2': not supported; expected one of llama,"),
    "no type": ({"model_type": None}, "its model_type is None: not supported; expected one of llama,"),
    "an encoder": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "'bert': not a decoder-only language"),
    "two halves": ({"model_type": "t5", "is_encoder_decoder": True}, "model_type is 't5': not a decoder-only language"),
    "no head": ({"architectures": ["LlamaModel"]}, "its architecture is LlamaModel; expected a model with a language"),
    "gemma2": ({"model_type": "gemma2"}, "norms after each sub-layer, soft caps on logits and local windows"),
    "gemma3": ({"model_type": "gemma3_text"}, "norms after each sub-layer and local windows"),
    "smollm3": ({"model_type": "smollm3"}, "what tokendepth does not have: layers without positions"),
    "experts": ({"model_type": "mixtral"}, "what tokendepth does not have: experts"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised (fp8); take the"),
    "an unknown key": ({"logit_scale": 0.5}, "its logit_scale is unknown and may change what the model computes"),
    "code of its own": ({"auto_map": {"AutoModel": "x.Y"}}, "its auto_map is unknown and may change"),
    "another activation": ({"hidden_act": "gelu"}, "its hidden_act is 'gelu', which tokendepth cannot compute"),
    "interleaved pairs": ({"rope_interleaved": True}, "its rope_interleaved is True, which tokendepth cannot compute"),
    "a part turned": ({"partial_rotary_factor": 0.5}, "its partial_rotary_factor is 0.5, which tokendepth cannot"),
    "no width": ({"hidden_size": None}, "it does not say its hidden_size"),
    "a width in words": ({"hidden_size": "16"}, "its hidden_size is '16'; expected int"),
    "a flag for a number": ({"num_hidden_layers": True}, "its num_hidden_layers is True; expected int"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "a model that tokendepth does not have (model.n_kv_head"),
    "a bias of mistral": ({"model_type": "mistral", "sliding_window": 64, "attention_bias": True}, "attention_bias"),
    "longer and longer": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "it does not say its rope_parameters.factor"),
    "another magnitude": ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, "rope_parameters.attention_factor is"),
    "scaled by mscale": ({"rope_scaling": {**YARN, "mscale": 0.7}}, "its rope_parameters.mscale is 0.7"),
    "an unknown rotation": ({"rope_scaling": {**YARN, "sections": 2}}, "its rope_parameters.sections is unknown"),
    "two rotations": ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "contradict each other"),
    "both types": ({"rope_scaling": {**YARN, "type": "linear"}}, "its rope_parameters.type is 'linear'"),
    "a window": ({"model_type": "mistral", "sliding_window": 32}, "import it with --context 32 or less"),
    "some windows": ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
                      "layer_types": ["full_attention", "sliding_attention"]}, "import it with --context 8 or less"),
    "odd layers": ({"model_type": "qwen2", "layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    "both directions": ({**GEMMA, "use_bidirectional_attention": True}, "its use_bidirectional_attention is True"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(changes, said):
    with pytest.raises(UserError) as error:
        model_config(tree(**changes))
    assert said in one_line(error.value)


def test_a_window_hides_nothing_from_a_context_that_fits_it():
    mistral = tree(model_type="mistral", sliding_window=32)
    assert model_config(mistral, context=32).context == 32
    with pytest.raises(UserError, match="a sliding window of 32 tokens"):
        model_config(mistral, context=33)
    with pytest.raises(UserError, match="a sliding window of 4096 tokens"):  # the default in transformers
        model_config(tree(model_type="mistral", max_position_embeddings=4097))


@pytest.mark.parametrize("context", [1, 65, -3])
def test_a_context_is_no_longer_than_the_model(context):
    with pytest.raises(UserError, match=f"--context is {context}; expected 2 to 64"):
        model_config(tree(), context=context)


def test_gemma_scales_by_the_root_of_the_width():
    assert model_config(tree(**GEMMA, hidden_size=24)).embedding_scale == math.sqrt(24)
