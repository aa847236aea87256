"""Span routing at its limits, for all deciders and both kinds of keys: all, some or no tokens take the span."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.methods.test_span import (
    MODEL,
    MODERN,
    close,
    dense_like,
    each_execution,
    given,
    method_of,
    span,
    span_blocks,
    tokens,
)
from tokendepth.config import ModelConfig
from tokendepth.methods.base import blocks_of
from tokendepth.model import LanguageModel

each_shape = pytest.mark.parametrize("shape", [MODEL, MODERN], ids=["classic", "modern"])
each_kind_of_keys = pytest.mark.parametrize("keys", ["active", "all"])
DECIDERS = ["score", "boundary", "gain", "entropy", "rule", "dice"]


def by_blocks(model: LanguageModel, ids: Tensor, active: Tensor, *, keys: str) -> tuple[Tensor, Tensor]:
    """Plain blocks, one after another: states before the span, and after it for the tokens that took it.

    With `keys` = all, a token that skips keeps the state it entered the span with in every block.
    """
    method = method_of(model)
    embedded, ctx = model.entering(ids, "hard")
    before = state = blocks_of(method.blocks)[0](embedded, ctx)
    for block in blocks_of(method.blocks)[1:-1]:
        seen = ctx if keys == "all" else replace(ctx, valid=active)
        state = torch.where(active[..., None], block(state, seen), state)
    return before, state


def finished(model: LanguageModel, ids: Tensor, state: Tensor) -> Tensor:
    _, ctx = model.entering(ids, "hard")
    return model.readout(blocks_of(method_of(model).blocks)[-1](state, ctx))


@each_shape
@each_execution
@each_kind_of_keys
@torch.no_grad()
def test_whose_keys_active_tokens_attend_over_by_hand(shape, execution, keys):
    model, ids = span(shape, decide="gain", carry="none", keys=keys).eval(), tokens()
    active = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    expected = finished(model, ids, by_blocks(model, ids, active, keys=keys)[1])
    other = finished(model, ids, by_blocks(model, ids, active, keys="active" if keys == "all" else "all")[1])
    found = model(ids, execution=execution, decisions=given(active)).logits
    assert close(found, expected)
    assert not close(found, other)


@each_shape
@each_execution
@each_kind_of_keys
@torch.no_grad()
def test_weighted_updates_of_every_token_by_hand(shape, execution, keys):
    """A score, the default, weights updates: with every token active the model is not the dense one."""
    model, ids = span(shape, keys=keys).eval(), tokens()
    every = torch.ones_like(ids, dtype=torch.bool)
    before, after = by_blocks(model, ids, every, keys="all")
    method, (_, ctx) = method_of(model), model.entering(ids, "hard")
    weight = torch.sigmoid(method.decider(method.seen(before, span_blocks(model)), ctx))[..., None]
    found = model(ids, execution=execution, decisions=given(every)).logits
    assert close(found, finished(model, ids, before + weight * (after - before)))
    assert not close(found, dense_like(model)(ids).logits)


@each_shape
@each_execution
@each_kind_of_keys
@pytest.mark.parametrize("decide", DECIDERS)
@torch.no_grad()
def test_a_text_of_which_no_token_takes_the_span_is_that_of_the_model_without_it(
    shape: ModelConfig, execution, keys, decide
):
    model, ids = span(shape, decide=decide, keys=keys).eval(), tokens()
    out = model(ids, execution=execution, decisions=given(torch.zeros_like(ids, dtype=torch.bool)))
    assert close(out.logits, dense_like(model, skip=method_of(model).span)(ids).logits)


def test_the_ratio_loss_is_weighted():
    ratio = {}
    for weight in (0.03, 0.06, 1.0):
        out = span(MODERN, decide="boundary", ratio_loss=weight).train()(tokens(8))
        ratio[weight] = out.losses["ratio"].item()
    assert ratio[1.0] > 0.5
    assert ratio == pytest.approx({weight: weight * ratio[1.0] for weight in ratio})
