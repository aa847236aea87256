"""What a pass holds at once: skipping must not need more than the dense model does."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tokendepth.config import BudgetConfig, DenseConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.methods import build
from tokendepth.model import LanguageModel

SHAPE = ModelConfig(d_model=64, n_layer=6, n_head=8, d_ff=256, context=64, dropout=0.0, vocab_size=1516)
"""A quarter of the paper's enwik8 shape in every width."""


def largest(run: Callable[[], object]) -> int:
    """Peak bytes of tensors that `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    held = most = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def made(method) -> LanguageModel:
    return build(RunConfig(model=SHAPE, method=method)).eval()


def test_what_is_held_by_hand():
    x = torch.zeros(1000)
    assert largest(lambda: (x + 1) + (x + 2)) == 3 * 4000


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("method", [TSAConfig(), BudgetConfig()], ids=["tsa", "budget"])
@torch.no_grad()
def test_skipping_holds_no_more_than_the_dense_model(method, batch):
    dense, model = made(DenseConfig()), made(method)
    ids, draws = torch.randint(SHAPE.vocab_size, (batch, 64)), torch.rand(5, batch, 64)
    allowed = largest(lambda: dense(ids))
    for fraction in (0.0, 0.1, 0.4, 0.8, 1.0):
        forced = model.forcing(draws < fraction)
        assert largest(lambda forced=forced: model(ids, execution="sparse", **forced)) <= allowed
