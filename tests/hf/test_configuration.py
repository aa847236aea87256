"""TokenDepthConfig is as strict as a run's config and keeps all of its fields."""

import json

import pytest
from transformers import AutoConfig

from tests.hf.samples import EVERY, run_config
from tests.tiny import one_line
from tokendepth.errors import UserError
from tokendepth.hf import TokenDepthConfig


@pytest.mark.parametrize("case", EVERY)
def test_saved_and_loaded_it_is_the_same(case, tmp_path):
    config = TokenDepthConfig.of(run_config(case, seed=3), execution="hard")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is TokenDepthConfig
    native, wanted = loaded.native, run_config(case, seed=3)
    assert (native.model, native.method, native.train.seed) == (wanted.model, wanted.method, 3)
    assert loaded.execution == "hard"
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


def test_every_value_is_written_so_that_defaults_may_change(tmp_path):
    TokenDepthConfig(model={"vocab_size": 7}).save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    assert tree["model"]["n_layer"] == 6
    assert tree["method"] == {"name": "dense"}
    assert tree["auto_map"]["AutoConfig"] == "configuration_tokendepth.TokenDepthConfig"


def test_others_ask_by_their_names():
    config = TokenDepthConfig.of(run_config("tsa modern"))
    asked = (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    assert asked == (11, 32, 3, 4)
    asked = (config.num_key_value_heads, config.head_dim, config.max_position_embeddings, config.tie_word_embeddings)
    assert asked == (2, 8, 16, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"executoin": "hard"}, "executoin: unknown key of a TokenDepthConfig; did you mean 'execution'?"),
        ({"max_length": 5}, "max_length: unknown key"),
        ({"execution": "fast"}, "execution is 'fast'; expected one of soft, hard, sparse"),
        ({"execution": 3}, "execution is 3"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"model": {"n_layers": 3}}, "model.n_layers: unknown key; did you mean 'n_layer'?"),
        ({"model": {"n_layer": 0}}, "model.n_layer is 0"),
        ({"model": {"n_layer": "3"}}, "model.n_layer is '3'; expected a whole number"),
        ({"model": 3}, "model is 3; expected a JSON object"),
        ({"method": {"name": "tas"}}, "method.name is 'tas': no such method; did you mean 'tsa'?"),
        ({"method": {"name": "tsa", "budget": 0.5}}, "method.budget: unknown key"),
        ({"method": {"name": "mor"}, "model": {"n_layer": 5}}, "model.n_layer is 5"),
        ({"format_version": 99}, "newer than this tokendepth can read"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(options, said):
    with pytest.raises(UserError) as error:
        TokenDepthConfig(**options)
    assert said in one_line(error.value)


def test_a_wrong_value_in_a_file_is_refused_too(tmp_path):
    TokenDepthConfig(model={"vocab_size": 7}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "model": {**tree["model"], "n_head": 7}}))
    with pytest.raises(UserError, match=r"model\.d_model is 256; expected a multiple of model\.n_head"):
        AutoConfig.from_pretrained(tmp_path)
