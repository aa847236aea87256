"""enwik8 by bytes, as in docs/WHERE_DEPTH_PAYS.md: a dense model, and spans of four blocks at the same cost.

Learning rates, warm-up and the position of the span come from the search on that page.
"""

from tokendepth.config import DataConfig, DenseConfig, MethodConfig, ModelConfig, RunConfig, SpanConfig, TrainConfig


def _run(method: MethodConfig, layers: int) -> RunConfig:
    model = ModelConfig(
        d_model=256, n_layer=layers, n_head=4, d_ff=688, context=256, dropout=0.0, norm="rms", positions="rotary",
        qk_norm=True, ffn="swiglu", ffn_bias=False,
    )  # fmt: skip
    train = TrainConfig(steps=4000, lr=2e-3, warmup=500, eval_every=1000, checkpoint_every=4000)
    return RunConfig(DataConfig("enwik8", "byte"), model, method, train)


def dense() -> RunConfig:
    """enwik8 by bytes, six layers for every byte."""
    return _run(DenseConfig(), layers=6)


def span() -> RunConfig:
    """enwik8 by bytes, span routing: four of nine layers run only at word ends, about a quarter of the bytes."""
    return _run(SpanConfig(begin=3, length=4, decide="rule"), layers=9)


def learned_span() -> RunConfig:
    """enwik8 by bytes, span routing by boundaries that are taught word ends in the first quarter of the training."""
    return _run(SpanConfig(begin=3, length=4, decide="boundary", carry="smooth", taught=0.25), layers=9)
