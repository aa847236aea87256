"""Models of every method with both kinds of block, native and for transformers, with the same weights."""

import pytest
import torch
from torch import Tensor

from tests.test_contract import CASES, lively
from tests.test_contract import run_config as run_config
from tests.test_contract import tokens as tokens
from tokendepth.hf import TokenDepthConfig, TokenDepthForCausalLM
from tokendepth.methods import METHODS
from tokendepth.model import LanguageModel

EVERY = [f"{method}{block}" for method in METHODS for block in ("", " modern")]
"""Each entry of METHODS with the classic and the Llama-style block."""
assert set(EVERY) <= set(CASES)
each_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case.endswith(" modern") else case for case in EVERY]
)
"""Slow cases with the Llama-style block run only in `make test-all`."""


def pair(case: str) -> tuple[LanguageModel, TokenDepthForCausalLM]:
    """The native model, shared between tests, and its copy for transformers, both in evaluation mode."""
    native = lively(case)
    model = TokenDepthForCausalLM(TokenDepthConfig.of(run_config(case)))
    model.model.load_state_dict(native.state_dict())
    return native, model.eval()


@torch.no_grad()
def greedy(native: LanguageModel, prompt: Tensor, new: int) -> Tensor:
    """Greedy continuation of one sequence `[time]`, recomputing everything for each token."""
    ids = prompt
    for _ in range(new):
        ids = torch.cat([ids, native(ids[None], execution="sparse").logits[0, -1:].argmax(-1)])
    return ids
