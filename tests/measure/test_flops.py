"""Training FLOPs, compared with arithmetic if a method is simple enough."""

import pytest
import torch

from tokendepth.config import BudgetConfig, DenseConfig, MethodConfig, MoDConfig, ModelConfig, RunConfig, override
from tokendepth.measure.describe import describe
from tokendepth.measure.flops import count_flops, training_flops
from tokendepth.methods import build
from tokendepth.recipes import RECIPES, recipe

MODEL = ModelConfig(d_model=32, n_layer=4, n_head=4, d_ff=64, context=16, vocab_size=23)
BLOCK = 2 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 16 * 32
HEAD = 2 * 32 * 23


def training(method: MethodConfig) -> float:
    return training_flops(RunConfig(model=MODEL, method=method))


def test_a_dense_step_costs_three_forward_passes():
    assert training(DenseConfig()) == 3 * (4 * BLOCK + HEAD)


def test_distillation_doubles_the_step():
    once, twice = (training(BudgetConfig(distill=weight)) for weight in (0.0, 1.0))
    assert twice == 2 * once


def test_what_a_capacity_leaves_out_is_not_paid_in_training():
    """Half of the tokens, so attention takes a quarter of the full square."""
    selected = 0.5 * (BLOCK - 4 * 16 * 32) + 0.25 * 4 * 16 * 32
    router = 2 * 32
    assert training(MoDConfig(capacity=0.5, decides="router")) == 3 * (2 * BLOCK + 2 * selected + HEAD + 2 * router)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_count_does_not_depend_on_the_kernel(dropout):
    """With dropout, attention on a CPU does not use the fused kernel; the products are the same."""
    q = torch.randn(1, 2, 8, 4, requires_grad=True)

    def attend() -> None:
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True)
        torch.autograd.grad(y.sum(), q)

    assert count_flops(attend, gradients=True) == 3 * 4 * 2 * 8 * 8 * 4


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("shakespeare", "synthetic.copy"))])
def test_describe_counts_what_a_forward_pass_spends_on_every_token(name):
    config = override(recipe(name), {"model.d_model": "32", "model.d_ff": "48", "model.vocab_size": "65"})
    with torch.no_grad():
        depth = build(config).eval()(torch.zeros(1, config.model.context, dtype=torch.long)).trace.totals()
    facts = describe(config)
    assert facts["flops_per_token"] == round(depth.flops / depth.tokens)
    assert facts["flops_per_token_without_routers"] == round(depth.flops_dense / depth.tokens)
    assert facts["parameters"] == sum(p.numel() for p in build(config).parameters())
