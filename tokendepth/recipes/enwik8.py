"""enwik8 by characters, as in section 3.3 of the TSA paper. Without dropout, which makes the baseline 5% worse."""

from tokendepth.config import (
    ACTConfig,
    BudgetConfig,
    DataConfig,
    DenseConfig,
    EarlyExitConfig,
    ITTConfig,
    MethodConfig,
    MoDConfig,
    ModelConfig,
    MoRConfig,
    RunConfig,
    SwitchConfig,
    TrainConfig,
    TSAConfig,
)


def _run(method: MethodConfig) -> RunConfig:
    return RunConfig(DataConfig("enwik8"), ModelConfig(context=256, dropout=0.0), method, TrainConfig())


def dense() -> RunConfig:
    """enwik8, fixed depth: 6,350,848 parameters."""
    return _run(DenseConfig())


def tsa() -> RunConfig:
    """enwik8, Token-Selective Attention at depth penalty 0.001: 6,433,413 parameters."""
    return _run(TSAConfig())


def budget() -> RunConfig:
    """enwik8, budget routing: trained for one budget, set by --method.budget."""
    return _run(BudgetConfig(dial=False, distill=0.0))  # both cost quality on a text this large (docs/LOG.md)


def mod() -> RunConfig:
    """enwik8, Mixture-of-Depths: an eighth of the tokens in every other block."""
    return _run(MoDConfig())


def early_exit() -> RunConfig:
    """enwik8, early exit by confidence, the baseline of the TSA paper."""
    return _run(EarlyExitConfig())


def switch() -> RunConfig:
    """enwik8, Switch: one of four experts in every other block."""
    return _run(SwitchConfig())


def act() -> RunConfig:
    """enwik8, adaptive computation time: one shared block, up to six steps."""
    return _run(ACTConfig())


def mor() -> RunConfig:
    """enwik8, Mixture-of-Recursions: two shared layers, applied twice."""
    return _run(MoRConfig())


def itt() -> RunConfig:
    """enwik8, Inner Thinking: every other layer up to four times."""
    return _run(ITTConfig())
