"""Small runs for two CPU cores and half a minute each, on text that every Python installation has."""

from tokendepth.config import (
    BudgetConfig,
    DataConfig,
    DenseConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    SpanConfig,
    TrainConfig,
    TSAConfig,
)


def _run(method: MethodConfig) -> RunConfig:
    model = ModelConfig(d_model=96, n_layer=6, n_head=4, d_ff=384, context=128, dropout=0.0)
    train = TrainConfig(
        steps=240, batch_size=8, lr=3e-3, eval_every=80, checkpoint_every=120, log_every=10, device="cpu"
    )
    return RunConfig(DataConfig("stdlib"), model, method, train)


def dense() -> RunConfig:
    """Python's standard library, fixed depth, half a minute on a CPU."""
    return _run(DenseConfig())


def tsa() -> RunConfig:
    """Python's standard library, Token-Selective Attention at depth penalty 0.01, half a minute on a CPU."""
    return _run(TSAConfig(depth_penalty=0.01))


def budget() -> RunConfig:
    """Python's standard library, budget routing, one minute on a CPU."""
    return _run(BudgetConfig())


def span() -> RunConfig:
    """Python's standard library, span routing: four of six layers run only at word ends, half a minute on a CPU."""
    return _run(SpanConfig(decide="rule", budget=0.45))
