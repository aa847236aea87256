"""Which blocks change the states least: planted blocks are found."""

from dataclasses import replace

import pytest
import torch

from tests.tiny import tiny
from tokendepth import data
from tokendepth.config import DenseConfig, ModelConfig, RunConfig
from tokendepth.measure.block_changes import (
    choose_span,
    likeness,
    loss_without,
    relative_updates,
    sample,
    shares_by_update,
)
from tokendepth.methods import build
from tokendepth.model import LanguageModel

SHAPE = ModelConfig(d_model=32, n_layer=7, n_head=4, d_ff=48, context=16, dropout=0.0, vocab_size=11)


@torch.no_grad()
def planted(*idle: int) -> LanguageModel:
    """A dense model in which some blocks add almost nothing."""
    model = build(RunConfig(model=SHAPE, method=DenseConfig())).eval()
    for n, block in enumerate(model.method.blocks):  # pyright: ignore
        for projection in (block.attention.out, block.ffn.down):  # pyright: ignore
            if projection.bias is not None:
                projection.bias.zero_()
            projection.weight.normal_(std=1e-4 if n in idle else 0.3, generator=torch.Generator().manual_seed(n))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Targets that the model itself finds likely, so that every block's update matters for the loss."""
    ids = torch.randint(11, (8, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return ids, planted(3, 4)(ids).logits.argmax(-1)


@pytest.mark.parametrize("by", ["alike", "loss"])
def test_the_span_is_where_least_is_changed(by):
    assert choose_span(planted(3, 4), batch(), 2, by) == range(3, 5)
    assert choose_span(planted(3, 4), batch(), 1, by).start in (3, 4)
    longer = choose_span(planted(3, 4), batch(), 3, by)
    assert set(longer) > {3, 4}


@pytest.mark.parametrize("by", ["alike", "loss"])
def test_the_ends_are_left_alone_unless_the_span_needs_them(by):
    assert choose_span(planted(0, 6), batch(), 5, by) == range(1, 6)
    assert len(choose_span(planted(0, 6), batch(), 6, by)) == 6
    assert choose_span(planted(0, 6), batch(), 7, by) == range(7)


@torch.no_grad()
def test_likeness_and_updates_by_hand():
    model, (ids, _) = planted(2), batch()
    hidden, ctx = model.entering(ids, "hard")
    states = [hidden]
    for block in model.method.blocks:  # pyright: ignore
        states.append(block(states[-1], ctx))
    found = likeness(model, ids, 3)
    assert len(found) == 5
    a, b = states[1], states[4]
    cosine = (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)
    assert found[1] == pytest.approx(cosine.mean().item(), rel=1e-5)
    sizes = relative_updates(model, ids)
    change = (states[2] - states[1]).norm(dim=-1) / states[1].norm(dim=-1)
    torch.testing.assert_close(sizes[1], change.flatten())
    assert sizes[2].max() < 0.01 < sizes[1].min()


def test_one_limit_for_all_gives_idle_blocks_less():
    model, (ids, _) = planted(3, 4), batch()
    shares = shares_by_update(model, ids, 0.5)
    assert len(shares) == 6
    assert sum(shares) / 6 == pytest.approx(0.5, abs=0.02)
    assert shares[2] == shares[3] == pytest.approx(0.02), "never none"
    assert min(shares[:2] + shares[4:]) > 0.02


def test_skipping_leaves_no_trace():
    model, inputs = planted(3), batch()
    before = loss_without(model, inputs, range(0))
    assert loss_without(model, inputs, range(1, 3)) > before + 0.01
    assert loss_without(model, inputs, range(0)) == before


def test_the_sample_is_the_same_for_the_same_text(tmp_path):
    config = replace(tiny(tmp_path), method=DenseConfig())
    first, again = (sample(data.load(config.data), 16) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
