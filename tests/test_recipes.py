"""Every recipe, shrunk, takes two optimiser steps on real data; and each says what it is."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from paper.pages import MEMBERS
from paper.schematic import SCHEMATICS
from tokendepth import data
from tokendepth.config import (
    BudgetConfig,
    DenseConfig,
    RunConfig,
    SpanConfig,
    from_dict,
    method_name,
    override,
    to_dict,
)
from tokendepth.errors import UserError
from tokendepth.methods import build
from tokendepth.recipes import RECIPES, recipe, summary
from tokendepth.training.loop import resolve
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep, learning_rate

SMALL = {"model.d_model": "32", "model.d_ff": "64", "model.n_head": "4", "train.batch_size": "4"}
ON_EVERY_MACHINE = ("stdlib", "copy", "sort")

each_recipe = pytest.mark.parametrize("name", RECIPES)


def shrunk(name: str) -> RunConfig:
    """The recipe at a size for a test; a corpus that would be downloaded gives way to one that is at hand."""
    least = {"mor": "4", "span": "8"}.get(method_name(recipe(name).method), "2")  # so that something recurs or ends
    small = {**SMALL, "model.n_layer": least}
    if name.startswith("modern."):
        pytest.importorskip("tokenizers")
        small = {
            **small,
            "model.n_kv_head": "2",
            "model.head_width": "8",
            "model.context": "64",
            "data.tokens": "bpe:300",
        }
    config = override(recipe(name), {**small, "train.device": "cpu", "train.dtype": "float32"})
    if config.data.corpus not in ON_EVERY_MACHINE:
        config = override(config, {"data.corpus": "stdlib"})
    return config


@each_recipe
def test_two_steps(name):
    config = shrunk(name)
    dataset = data.load(config.data)
    config = resolve(config, dataset)
    model = build(config, dataset.tokenizer.spellings()).train()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    take_step = OptimiserStep(model, config.train, torch.device("cpu"), Ranks())
    # The same batch twice: the second loss must have fallen. A step of AdamW moves each weight by its learning rate,
    # which on these models is worth some hundredths of a nat; dropout at 0.1 makes a thousandth.
    inputs, targets = dataset.train_batch(
        seed=config.train.seed, step=0, batch_size=config.train.batch_size, context=config.model.context
    )
    first, second = (take_step(inputs, targets, step=step, lr=learning_rate(step, config.train)) for step in range(2))
    assert first.task == pytest.approx(math.log(config.model.vocab_size), abs=0.2), "untrained: every token alike"
    assert second.task < first.task
    for stats in (first, second):
        assert all(math.isfinite(number) for number in (stats.task, stats.depth, stats.grad_norm, *stats.work))
        assert stats.grad_norm > 0
        method = config.method
        has_losses = not isinstance(method, DenseConfig) and (
            not isinstance(method, BudgetConfig) or method.dial or method.distill > 0
        )
        if isinstance(method, SpanConfig):
            has_losses = method.decide == "boundary"
        assert (stats.depth != 0) == has_losses
    for key, value in model.named_parameters():
        assert value.isfinite().all(), key
        assert not torch.equal(value, before[key]), key


@each_recipe
def test_a_recipe_is_a_complete_config(name):
    config = recipe(name)
    assert config.recipe == name
    assert from_dict(to_dict(config)) == config
    assert config.model.vocab_size == 0, "the corpus says it"
    assert RECIPES[name]() == RECIPES[name](), "a recipe is a function of nothing"


@each_recipe
def test_a_recipe_says_what_it_is(name):
    assert len(summary(name)) > 20
    assert summary(name) in RECIPES[name].__doc__
    module, function = name.split(".")
    assert RECIPES[name].__module__ == f"tokendepth.recipes.{module}"
    assert RECIPES[name].__name__ == function


@each_recipe
def test_recipes_that_are_to_be_compared_differ_in_the_method_alone(name):
    config = recipe(name)
    method = method_name(config.method)
    assert re.search(rf"[._]{method}(_\d+m)?$", name), "the method, and a size where there are several"
    dense = recipe(name.replace("learned_", "").replace(method, "dense"))
    layers = dense.model.n_layer if method == "span" else config.model.n_layer  # a span has more, of the same FLOPs
    assert (config.data, replace(config.model, n_layer=layers), config.train) == (dense.data, dense.model, dense.train)


@pytest.mark.parametrize("corpus", ["shakespeare", "enwik8"])
def test_every_method_that_is_compared_has_a_recipe_on_text(corpus):
    found = {method_name(recipe(name).method) for name in RECIPES if name.startswith(f"{corpus}.")}
    assert found == SCHEMATICS.keys() - MEMBERS.keys()


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError) as caught:
        recipe("shakespear.tsa")
    assert str(caught.value) == "'shakespear.tsa': no such recipe; did you mean 'shakespeare.tsa'?"
    with pytest.raises(UserError) as caught:
        recipe("zzz")
    assert "'zzz'" in str(caught.value)
    assert all(name in str(caught.value) for name in RECIPES), "nothing is near, so all are named"


@each_recipe
def test_a_recipe_is_what_its_file_will_say(name):
    """0 and 0.0 are equal, but not as JSON, by which experiments are told apart."""
    assert json.dumps(to_dict(from_dict(to_dict(recipe(name))))) == json.dumps(to_dict(recipe(name)))


# --- sizes of the modern recipes --------------------------------------------------------------------------------------

each_size = pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("modern.")])


def parameters(config: RunConfig) -> int:
    """Parameters of a dense model with the Llama-style block, by formula."""
    model, vocabulary = config.model, data.vocab_size(config.data)
    attention = model.d_model * model.width * (2 * model.n_head + 2 * model.kv_heads) + 2 * model.width
    block = attention + 3 * model.d_model * model.d_ff + 2 * model.d_model
    return vocabulary * model.d_model + model.n_layer * block + model.d_model


@each_size
def test_a_modern_recipe_has_the_parameters_of_its_name_and_summary(name):
    config, named = recipe(name), int(re.search(r"_(\d+)m$", name)[1])
    assert f"about {named}M parameters" in summary(name)
    with torch.device("meta"):
        model = build(replace(config, model=replace(config.model, vocab_size=data.vocab_size(config.data))))
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == pytest.approx(1e6 * named, rel=0.05)
    assert parameters(config) == pytest.approx(1e6 * named, rel=0.03)
    routers = found - parameters(config)
    assert (routers == 0) == isinstance(config.method, DenseConfig)
    assert 0 <= routers < 0.03 * found


@each_size
def test_a_modern_recipe_is_of_the_modern_shape(name):
    model = recipe(name).model
    assert (model.norm, model.positions, model.ffn) == ("rms", "rotary", "swiglu")
    assert model.qk_norm
    assert model.tie_head
    assert not model.ffn_bias
    assert (model.attention_bias, model.dropout) == ("none", 0.0)
    assert model.width == 64
    assert model.n_head * model.width == model.d_model
    assert 1 < model.kv_heads < model.n_head
    assert model.d_ff % 64 == 0
    assert abs(model.d_ff - model.d_model * 8 / 3) <= 32
