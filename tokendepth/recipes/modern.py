"""enwik8 by BPE with Llama-style blocks, in three sizes.

RMSNorm, rotary positions, SwiGLU, no biases, heads of width 64, keys and values shared by groups of heads, normalised
queries and keys, and an output head tied to the embedding. The names count all parameters, including the embedding.
Each trains for three to four epochs.
"""

from tokendepth.config import (
    BudgetConfig,
    DataConfig,
    DenseConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)


def _model(d_model: int, n_layer: int, n_kv_head: int, d_ff: int, context: int) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        n_layer=n_layer,
        n_head=d_model // 64,
        n_kv_head=n_kv_head,
        head_width=64,
        d_ff=d_ff,
        context=context,
        dropout=0.0,
        norm="rms",
        positions="rotary",
        qk_norm=True,
        ffn="swiglu",
        ffn_bias=False,
    )


def _10m(method: MethodConfig) -> RunConfig:
    model = _model(d_model=256, n_layer=11, n_kv_head=2, d_ff=704, context=512)
    return RunConfig(DataConfig("enwik8", "bpe:8192"), model, method, TrainConfig(lr=1e-3, steps=5000, batch_size=32))


def _50m(method: MethodConfig) -> RunConfig:
    model = _model(d_model=512, n_layer=16, n_kv_head=4, d_ff=1344, context=1024)
    return RunConfig(DataConfig("enwik8", "bpe:8192"), model, method, TrainConfig(lr=1e-3, steps=3500, batch_size=32))


def _124m(method: MethodConfig) -> RunConfig:
    model = _model(d_model=768, n_layer=16, n_kv_head=3, d_ff=2048, context=1024)
    return RunConfig(DataConfig("enwik8", "bpe:32768"), model, method, TrainConfig(lr=1e-3, steps=3000, batch_size=32))


def _budget() -> MethodConfig:
    return BudgetConfig(dial=False, distill=0.0)  # both cost quality on a text this large (docs/LOG.md)


def dense_10m() -> RunConfig:
    """enwik8 by BPE, Llama-style blocks, fixed depth: about 10M parameters."""
    return _10m(DenseConfig())


def budget_10m() -> RunConfig:
    """enwik8 by BPE, Llama-style blocks, budget routing: about 10M parameters."""
    return _10m(_budget())


def dense_50m() -> RunConfig:
    """enwik8 by BPE, Llama-style blocks, fixed depth: about 50M parameters."""
    return _50m(DenseConfig())


def budget_50m() -> RunConfig:
    """enwik8 by BPE, Llama-style blocks, budget routing: about 50M parameters."""
    return _50m(_budget())


def dense_124m() -> RunConfig:
    """enwik8 by BPE, Llama-style blocks, fixed depth: about 124M parameters."""
    return _124m(DenseConfig())


def budget_124m() -> RunConfig:
    """enwik8 by BPE, Llama-style blocks, budget routing: about 124M parameters."""
    return _124m(_budget())
