"""One file per paper. A new method needs a file here, an entry in METHODS, and a config class in method_configs.py."""

from collections.abc import Sequence

import torch

from tokendepth.config import RunConfig, method_name
from tokendepth.methods.act import ACT
from tokendepth.methods.base import Dial, Method
from tokendepth.methods.budget import Budget
from tokendepth.methods.dense import Dense
from tokendepth.methods.early_exit import EarlyExit
from tokendepth.methods.itt import ITT
from tokendepth.methods.mod import MoD
from tokendepth.methods.mor import MoR
from tokendepth.methods.span import Span
from tokendepth.methods.switch import Switch
from tokendepth.methods.tsa import TSA
from tokendepth.model import LanguageModel

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "tsa": TSA,
    "budget": Budget,
    "mod": MoD,
    "early_exit": EarlyExit,
    "switch": Switch,
    "act": ACT,
    "mor": MoR,
    "itt": ITT,
    "span": Span,
}


def build(config: RunConfig, spellings: Sequence[bytes] | None = None) -> LanguageModel:
    """The untrained model for `config`, on the CPU. The same seed gives the same weights; the global RNG is untouched.

    spellings: the text of each token (`Tokenizer.spellings`), for methods that decide by it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.train.seed)
        method = METHODS[method_name(config.method)](config.model, config.method)
        if spellings is not None:
            method.read_vocabulary(spellings)
        return LanguageModel(config.model, method)


def outline(config: RunConfig) -> LanguageModel:
    """The model for `config` on the meta device: shapes without memory."""
    with torch.device("meta"):
        return build(config)


def dial_of(config: RunConfig) -> Dial | None:
    """The dial of a trained model with this `config`; None if it can be executed at one cost only."""
    return METHODS[method_name(config.method)].dial(config.model, config.method)
