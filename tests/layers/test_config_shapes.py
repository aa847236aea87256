"""Invalid shapes of a model: each gives a one-line error that names the option and what was expected."""

from dataclasses import replace

import pytest

from tests.tiny import one_line
from tokendepth.config import DenseConfig, ModelConfig, RunConfig, from_dict, to_dict
from tokendepth.errors import UserError

ROTARY = {"positions": "rotary"}
LLAMA3 = {**ROTARY, "rope_scaling": "llama3", "rope_original_context": 64}
YARN = {**ROTARY, "rope_scaling": "yarn", "rope_original_context": 64}

REFUSED = {
    "kv heads that do not divide": ({"n_kv_head": 3}, "model.n_kv_head is 3; expected 0, or a divisor of"),
    "more kv heads than heads": ({"n_kv_head": 16}, "model.n_kv_head is 16; expected 0, or a divisor of"),
    "less than no kv heads": ({"n_kv_head": -2}, "model.n_kv_head is -2; expected 0, or a divisor of"),
    "a part of a kv head": ({"n_kv_head": 2.0}, "model.n_kv_head is 2.0; expected a whole number"),
    "heads that do not divide": ({"d_model": 30}, "model.d_model is 30; expected a multiple of model.n_head (8)"),
    "less than no width": ({"head_width": -8}, "model.head_width is -8; expected a number from 0"),
    "an odd rotary width": ({**ROTARY, "head_width": 7}, "model.head_width is 7, an odd number; expected an even one"),
    "an odd rotary quotient": ({**ROTARY, "d_model": 24}, "model.head_width is 3, an odd number"),
    "stretched learned positions": ({"rope_scaling": "linear"}, "since learned positions are not rotary"),
    "llama3 of no context": ({**LLAMA3, "rope_original_context": 0}, "expected the context before scaling"),
    "yarn of no context": ({**YARN, "rope_original_context": 0}, "expected the context before scaling"),
    "less than no context": ({**YARN, "rope_original_context": -1}, "model.rope_original_context is -1"),
    "a base for nothing": (
        {"rope_base": 5e5},
        "model.rope_base is 500000.0; expected 10000.0, since learned positions",
    ),
    "a factor for nothing": ({**ROTARY, "rope_factor": 4.0}, "expected 1.0, since model.rope_scaling is none"),
    "no number": ({**ROTARY, "rope_low": float("nan")}, "model.rope_low is nan; expected a number from 0"),
    "no end": ({**ROTARY, "rope_high": float("inf")}, "model.rope_high is inf; expected a number from 0"),
    "shrunk": ({**ROTARY, "rope_scaling": "linear", "rope_factor": 0.5}, "model.rope_factor is 0.5; expected a number"),
    "no factor": ({**ROTARY, "rope_factor": float("nan")}, "model.rope_factor is nan"),
    "llama3 without a blend": (
        {**LLAMA3, "rope_low": 4.0},
        "model.rope_low is 4.0; expected a number above 0",
    ),
    "yarn upside down": (
        {**YARN, "rope_low": 8.0, "rope_high": 2.0},
        "model.rope_low is 8.0; expected a number above 0",
    ),
    "no turns": ({**YARN, "rope_low": 0.0}, "model.rope_low is 0.0; expected a number above 0 and below 32"),
    "a base of one": ({**ROTARY, "rope_base": 1.0}, "model.rope_base is 1.0; expected a number above 1"),
    "no base": ({**ROTARY, "rope_base": float("nan")}, "model.rope_base is nan; expected a number above 1"),
    "no epsilon": ({"norm_eps": 0.0}, "model.norm_eps is 0.0; expected a number above 0"),
    "not an epsilon": ({"norm_eps": float("nan")}, "model.norm_eps is nan; expected a number above 0"),
    "another norm": ({"norm": "batch"}, "model.norm is 'batch'; expected one of layer, rms"),
    "other positions": ({"positions": "alibi"}, "model.positions is 'alibi'; expected one of learned, rotary"),
    "another scaling": ({**ROTARY, "rope_scaling": "ntk"}, "expected one of none, linear, llama3, yarn"),
    "another network": ({"ffn": "relu"}, "model.ffn is 'relu'; expected one of gelu, swiglu, geglu"),
    "another bias": ({"attention_bias": "q"}, "model.attention_bias is 'q'; expected one of none, qkv, all"),
    "no embedding": ({"embedding_scale": 0.0}, "model.embedding_scale is 0.0; expected a number from 1e-06 to 1e+06"),
    "a number for a flag": ({"qk_norm": 1}, "model.qk_norm is 1; expected true or false"),
}

TAKEN = {
    "a width that does not divide": {"d_model": 30, "head_width": 8},
    "an odd width without rotary": {"head_width": 7},
    "one kv head": {"n_kv_head": 1},
    "as many kv heads as heads": {"n_kv_head": 8},
    "linear": {**ROTARY, "rope_scaling": "linear", "rope_factor": 4.0},
    "llama3": {**LLAMA3, "rope_factor": 8.0},
    "yarn": {**YARN, "rope_factor": 8.0, "rope_low": 2.0, "rope_high": 16.0},
    "scaled embeddings": {"embedding_scale": 2.5},
    "modern": {**ROTARY, "norm": "rms", "n_kv_head": 2, "ffn": "swiglu", "ffn_bias": False, "qk_norm": True},
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_how(options, said):
    with pytest.raises(UserError) as error:
        ModelConfig(**options)
    message = one_line(error.value)
    assert said in message
    assert "--model." in message, "and says which flag sets it"


@pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN)
def test_what_is_taken_comes_back_from_json(options):
    config = RunConfig(model=ModelConfig(**options), method=DenseConfig())
    assert from_dict(to_dict(config)) == config


def test_a_config_from_before_these_options_is_the_classic_model():
    tree = to_dict(RunConfig(model=ModelConfig(d_model=64), method=DenseConfig()))
    old = {"d_model", "n_layer", "n_head", "d_ff", "context", "dropout", "vocab_size"}
    tree["model"] = {key: value for key, value in tree["model"].items() if key in old}
    assert from_dict(tree).model == ModelConfig(d_model=64)


def test_width_and_kv_heads_are_derived():
    model = ModelConfig(d_model=64, n_head=8)
    assert (model.width, model.kv_heads) == (8, 8)
    assert (replace(model, head_width=12).width, replace(model, n_kv_head=2).kv_heads) == (12, 2)
