"""What a config needs, judged before anything is allocated."""

import math
from dataclasses import replace

import pytest
import torch

from tests.tiny import one_line
from tokendepth.config import DenseConfig, ModelConfig, RetrofitConfig, RunConfig, TrainConfig
from tokendepth.errors import UserError
from tokendepth.measure import describe

MODEL = ModelConfig(d_model=256, n_layer=6, n_head=4, d_ff=1024, context=256, vocab_size=256)
CONFIG = RunConfig(model=MODEL, method=DenseConfig())
CPU = torch.device("cpu")
STATES = 4 * 256 * 6 * 256
"""Bytes of one sequence: what enters each block, in float32."""


def config(**train) -> RunConfig:
    return replace(CONFIG, train=TrainConfig(**train))


@pytest.fixture
def memory(monkeypatch):
    """Sets the memory of this machine, in bytes beyond what the model itself takes."""
    own = describe.TRAINING_BYTES * describe.describe(CONFIG)["parameters"]
    monkeypatch.setattr(describe, "memory_bytes", lambda _: math.inf)
    return lambda beyond: monkeypatch.setattr(describe, "memory_bytes", lambda _: own + beyond)


def test_a_model_that_does_not_fit_is_refused(memory):
    memory(-1)
    with pytest.raises(UserError) as error:
        describe.check_fits(config(batch_size=1), CPU)
    said = "GiB for training, more than the 0.1 GiB of this machine's cpu; lower --model.d-model"
    assert said in one_line(error.value)


def test_weights_that_are_not_trained_take_only_their_own_memory(memory):
    memory(-1)
    retrofit = RetrofitConfig(base="runs/base", sha256="0" * 64, trains="lora")
    describe.check_fits(replace(config(batch_size=1), retrofit=retrofit), CPU)
    with pytest.raises(UserError):
        describe.check_fits(replace(config(batch_size=1), retrofit=replace(retrofit, trains="all")), CPU)


def test_a_batch_that_does_not_fit_is_refused(memory):
    memory(64 * STATES)
    describe.check_fits(config(batch_size=64), CPU)
    with pytest.raises(UserError) as error:
        describe.check_fits(config(batch_size=65), CPU)
    assert "train.batch_size is 65, which needs at least 0.2 GiB" in one_line(error.value)


def test_only_sequences_of_one_pass_need_memory_at_once(memory):
    memory(16 * STATES)
    describe.check_fits(config(batch_size=64, accumulate=2), CPU, ranks=2)
    with pytest.raises(UserError) as error:
        describe.check_fits(config(batch_size=68, accumulate=2), CPU, ranks=2)
    assert "train.batch_size is 68 (17 at a time), which needs" in one_line(error.value)
    assert "or raise --train.accumulate" in one_line(error.value)
