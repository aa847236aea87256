"""Timed optimiser steps: which ones are measured, and the content of their rows."""

import torch

from tokendepth.bench import training
from tokendepth.config import ModelConfig
from tokendepth.runs.results import read_rows

SMALL = {"d16 L3 V50, 2x16": (ModelConfig(16, 3, 2, 32, 16, 0.0, 50), 2)}


def test_what_skipping_gains_has_a_row_of_its_own(tmp_path):
    (costs,) = training.measure_steps(SMALL, torch.device("cpu"), tmp_path)
    (skipping,) = training.measure_skipping(SMALL, torch.device("cpu"), tmp_path)
    assert {name for name in costs if name.endswith("_ms")} == {"dense_ms", "tsa_ms", "early_exit_ms"}
    assert {name for name in skipping if name.endswith("_ms")} == {"dense_ms", "budget_ms"}
    assert skipping["budget_ratio"][1] <= skipping["budget_ratio"][0] <= skipping["budget_ratio"][2]
    assert [row["benchmark"] for row in read_rows(tmp_path / "training.json")] == ["training step", "skipping step"]
