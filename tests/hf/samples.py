"""Models of every method on both kinds of block, native and as transformers has them, with the same weights."""

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
"""Each entry of METHODS on the classic and on the modern block."""
assert set(EVERY) <= set(CASES)
each_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case.endswith(" modern") else case for case in EVERY]
)
"""What takes seconds is tried on the modern block by `make test-all`."""


def pair(case: str) -> tuple[LanguageModel, TokenDepthForCausalLM]:
    """The native model, shared between tests, and a copy in transformers' form; both in evaluation mode."""
    native = lively(case)
    model = TokenDepthForCausalLM(TokenDepthConfig.of(run_config(case)))
    model.model.load_state_dict(native.state_dict())
    return native, model.eval()


@torch.no_grad()
def greedy(native: LanguageModel, prompt: Tensor, new: int) -> Tensor:
    """The likeliest continuation of one sequence `[time]`, everything computed anew for each token."""
    ids = prompt
    for _ in range(new):
        ids = torch.cat([ids, native(ids[None], execution="sparse").logits[0, -1:].argmax(-1)])
    return ids
