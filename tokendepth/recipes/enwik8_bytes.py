"""enwik8 by bytes: twelve layers with RMSNorm and rotary positions; with span routing most tokens take four of them."""

from tokendepth.config import DataConfig, DenseConfig, MethodConfig, ModelConfig, RunConfig, SpanConfig, TrainConfig


def _run(method: MethodConfig) -> RunConfig:
    model = ModelConfig(n_layer=12, context=256, dropout=0.0, norm="rms", positions="rotary")
    return RunConfig(DataConfig("enwik8", "byte"), model, method, TrainConfig(lr=1e-3, steps=4000))


def dense() -> RunConfig:
    """enwik8 by bytes, twelve layers for every byte."""
    return _run(DenseConfig())


def span() -> RunConfig:
    """enwik8 by bytes, span routing: the eight middle layers run where words end, for about a quarter of the bytes."""
    return _run(SpanConfig(begin=2, decide="rule"))
