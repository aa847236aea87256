"""Copy and sort, with the settings that gave the numbers printed in the TSA paper.

Its text says source length 10 and 10,000 steps; its tables came from length 20, batch 256, about 400 steps and a depth
penalty of 0.01. For the settings in the text: `--data.source-length 10 --train.steps 10000`.
"""

from tokendepth.config import (
    BudgetConfig,
    DataConfig,
    DenseConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    TSAConfig,
)


def _run(corpus: str, method: MethodConfig) -> RunConfig:
    model = ModelConfig(d_model=128, n_layer=6, n_head=4, d_ff=512, context=64, dropout=0.0)
    train = TrainConfig(steps=400, batch_size=256, eval_every=100, checkpoint_every=200, log_every=10)
    return RunConfig(DataConfig(corpus), model, method, train)


def copy_dense() -> RunConfig:
    """Copy, fixed depth: 1,199,104 parameters."""
    return _run("copy", DenseConfig())


def copy_tsa() -> RunConfig:
    """Copy, Token-Selective Attention at depth penalty 0.01: 1,219,909 parameters."""
    return _run("copy", TSAConfig(depth_penalty=0.01))


def sort_dense() -> RunConfig:
    """Sort, fixed depth: 1,199,104 parameters."""
    return _run("sort", DenseConfig())


def sort_tsa() -> RunConfig:
    """Sort, Token-Selective Attention at depth penalty 0.01: 1,219,909 parameters."""
    return _run("sort", TSAConfig(depth_penalty=0.01))


def copy_budget() -> RunConfig:
    """Copy, budget routing."""
    return _run("copy", BudgetConfig())


def sort_budget() -> RunConfig:
    """Sort, budget routing."""
    return _run("sort", BudgetConfig())
