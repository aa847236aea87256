"""Thresholds for a budget, found on training text: whatever a model is judged by, they have never seen it."""

from typing import Any

import torch

from tokendepth import data
from tokendepth.config import check_budget, method_name
from tokendepth.data import Dataset
from tokendepth.errors import UserError
from tokendepth.files import read_json, write_json
from tokendepth.methods.budget import Budget
from tokendepth.model import LanguageModel
from tokendepth.runs import Run

TOKENS = 2**15
"""Enough for a share of tokens to be known to about 0.003."""
SEED = 2**31
"""No training run may have this one, so calibration draws windows of its own."""


def calibrate(model: LanguageModel, dataset: Dataset, budget: float | None = None) -> None:
    """Set the thresholds of `model` so that `budget` (its own, if none is named) holds on training text."""
    method = model.method
    if not isinstance(method, Budget):
        return
    context = model.config.context
    ids, _ = dataset.train_batch(seed=SEED, step=0, batch_size=max(1, TOKENS // context), context=context)
    was_training, device = model.training, model.embedding.weight.device
    model.eval()
    try:
        model.calibrate(torch.from_numpy(ids).to(device), budget or method.budget)
    finally:
        model.train(was_training)


def set_budget(model: LanguageModel, run: Run, budget: float, dataset: Dataset | None = None) -> None:
    """Execute the model of `run` at `budget`: by the thresholds that were kept for it, else by new ones."""
    check(run, budget)
    assert isinstance(model.method, Budget)
    kept = _kept(run).get(f"{budget:g}")
    if kept is None:
        calibrate(model, dataset or data.load(run.config.data), budget)
    else:
        model.method.thresholds = kept


def check(run: Run, budget: float) -> None:
    check_budget("budget", budget)
    if method_name(run.config.method) != "budget":
        name = method_name(run.config.method)
        raise UserError(f"{run.path} is of method {name}, which has no budget to set; train one: shakespeare.budget")


def keep(model: LanguageModel, run: Run, budget: float) -> None:
    """Write the model's thresholds into the run, so that it can be executed at `budget` where its corpus is not."""
    assert isinstance(model.method, Budget)
    write_json(_path(run), {"version": 1, "thresholds": {**_kept(run), f"{budget:g}": model.method.thresholds}})


def _path(run: Run):
    return run.path / "calibration.json"


def _kept(run: Run) -> dict[str, Any]:
    if not _path(run).exists():
        return {}
    tree = read_json(_path(run))
    layers = run.config.model.n_layer - 1
    table = tree.get("thresholds") if isinstance(tree, dict) and tree.get("version") == 1 else None
    if not isinstance(table, dict) or not all(_is_row(row, layers) for row in table.values()):
        raise UserError(f"{_path(run)} is damaged or of another version; remove it and calibrate again")
    return table


def _is_row(row: object, length: int) -> bool:
    return isinstance(row, list) and len(row) == length and all(type(value) is float for value in row)
