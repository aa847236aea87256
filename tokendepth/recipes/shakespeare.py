"""Tiny-Shakespeare by characters, as in section 3.2 of the TSA paper."""

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
    return RunConfig(DataConfig("shakespeare"), ModelConfig(context=128), method, TrainConfig())


def dense() -> RunConfig:
    """Tiny-Shakespeare, fixed depth: 4,782,336 parameters."""
    return _run(DenseConfig())


def tsa() -> RunConfig:
    """Tiny-Shakespeare, Token-Selective Attention at depth penalty 0.001: 4,864,901 parameters."""
    return _run(TSAConfig())


def budget() -> RunConfig:
    """Tiny-Shakespeare, budget routing: trained for every budget; --method.budget sets the default."""
    return _run(BudgetConfig())


def mod() -> RunConfig:
    """Tiny-Shakespeare, Mixture-of-Depths: an eighth of the tokens in every other block."""
    return _run(MoDConfig())


def early_exit() -> RunConfig:
    """Tiny-Shakespeare, early exit by confidence, the baseline of the TSA paper."""
    return _run(EarlyExitConfig())


def switch() -> RunConfig:
    """Tiny-Shakespeare, Switch: one of four experts in every other block."""
    return _run(SwitchConfig())


def act() -> RunConfig:
    """Tiny-Shakespeare, adaptive computation time: one shared block, up to six steps."""
    return _run(ACTConfig())


def mor() -> RunConfig:
    """Tiny-Shakespeare, Mixture-of-Recursions: two shared layers, applied twice."""
    return _run(MoRConfig())


def itt() -> RunConfig:
    """Tiny-Shakespeare, Inner Thinking: every other layer up to four times."""
    return _run(ITTConfig())
