"""Losses of five steps, written down once: a refactoring that moves them has changed the model, not only the code.

Other processors round otherwise, by about 1e-6 a step here; a real change of initialisation, data order or update moves
the third digit. A deliberate change writes new numbers down, and says why in the log.
"""

import pytest
import torch

from tokendepth import data
from tokendepth.config import DataConfig, DenseConfig, ModelConfig, RunConfig, TrainConfig, TSAConfig
from tokendepth.methods import build
from tokendepth.training.loop import resolve
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep, learning_rate

GOLDEN = {
    "dense": (DenseConfig(), [3.47401, 3.446975, 3.393824, 3.398265, 3.406215]),
    "tsa": (TSAConfig(depth_penalty=0.05), [3.516293, 3.466031, 3.43476, 3.413478, 3.429541]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_five_steps_on_copy(name):
    method, expected = GOLDEN[name]
    model = ModelConfig(d_model=32, n_layer=3, n_head=4, d_ff=64, context=24, dropout=0.0)
    config = RunConfig(
        DataConfig("copy", source_length=10), model, method, TrainConfig(steps=5, batch_size=16, lr=0.01)
    )
    dataset = data.load(config.data)
    config = resolve(config, dataset)
    step = OptimiserStep(build(config).train(), config.train, torch.device("cpu"), Ranks())
    losses = []
    for number in range(5):
        batch = dataset.train_batch(seed=0, step=number, batch_size=16, context=24)
        stats = step(*batch, step=number, lr=learning_rate(number, config.train))
        losses.append(stats.task + stats.depth)
    assert losses == pytest.approx(expected, rel=1e-4)
