"""Thresholds for a budget, found on training text: whatever a model is judged by, they have never seen it."""

import math
from typing import Any

import torch
from torch import Tensor

from tokendepth import data
from tokendepth.config import RunConfig, check_budget, method_name
from tokendepth.data import Dataset
from tokendepth.errors import UserError
from tokendepth.methods import dial_of, outline
from tokendepth.model import LanguageModel
from tokendepth.runs.files import read_json, write_json
from tokendepth.runs.run import Run

FIRST_TOKENS, FEWEST_WINDOWS, MOST_TOKENS = 2**15, 32, 2**19
WANTED_ERROR = 0.003
"""Of a routed block's share of active tokens, one standard error: so many windows are looked at as that takes in the
block whose windows differ most, up to the most.

How many depends on the text. Windows of plays are much alike; those of an encyclopaedia, with its tables and foreign
words, are not: 128 of 256 characters put the share anywhere from 0.39 to 0.43 where 0.40 is asked for.
"""
AT_ONCE = 2**14
"""Tokens: what a block makes of more would not fit everywhere."""
SEED = 2**31
"""No training run may have this one, so calibration draws windows of its own."""


def calibrate(model: LanguageModel, dataset: Dataset, budget: float | None = None, *, roughly: bool = False) -> None:
    """Set the thresholds of `model` so that `budget` (its own, if none is named) holds on training text.

    `roughly` is for a look in passing: the first windows, whatever the text.
    """
    dial, context = model.method.dial(model.config, model.method.config), model.config.context
    if dial is None or not dial.calibrated:
        return
    budget, windows = budget or dial.own, max(FEWEST_WINDOWS, FIRST_TOKENS // context)
    was_training = model.training
    model.eval()
    try:
        shares = calibrate_on(model, _windows(dataset, windows, context), budget)
        wanted = math.ceil(float(shares.var(-1).max()) / WANTED_ERROR**2)
        if wanted > windows and not roughly:
            most = max(FEWEST_WINDOWS, MOST_TOKENS // context)
            calibrate_on(model, _windows(dataset, min(wanted, most), context), budget)
    finally:
        model.train(was_training)


def _windows(dataset: Dataset, count: int, context: int) -> Tensor:
    ids, _ = dataset.train_batch(seed=SEED, step=0, batch_size=count, context=context)
    return torch.from_numpy(ids)


@torch.no_grad()
def calibrate_on(model: LanguageModel, ids: Tensor, budget: float) -> Tensor:
    """Set the thresholds so that `budget` of the tokens of `ids` is active; returns what `Method.calibrate` does."""
    entering = [model.entering(part, "hard") for part in ids.to(model.norm.weight.device).split(_at_once(ids))]
    _, ctx = entering[0]
    return model.method.calibrate([hidden for hidden, _ in entering], ctx, budget)


def _at_once(ids: Tensor) -> int:
    return max(1, AT_ONCE // ids.shape[1])


def set_budget(model: LanguageModel, run: Run, budget: float, dataset: Dataset | None = None) -> None:
    """Execute the model of `run` at `budget`: by the thresholds that were kept for it, else by new ones."""
    check(run, budget)
    kept = _kept(run).get(f"{budget:g}")
    if kept is None:
        calibrate(model, dataset or data.load(run.config.data), budget)
    else:
        model.method.set_thresholds(kept)


def check(run: Run, budget: float) -> None:
    check_budget("budget", budget)
    if not has_budget(run.config):
        name = method_name(run.config.method)
        raise UserError(f"{run.path} is of method {name}, which has no budget to set; train one: shakespeare.budget")


def has_budget(config: RunConfig) -> bool:
    """Whether a model of this config is executed at a share of its tokens that can be named."""
    dial = dial_of(config)
    return dial is not None and dial.calibrated


def keep(model: LanguageModel, run: Run, budget: float) -> None:
    """Write the model's thresholds into the run, so that it can be executed at `budget` where its corpus is not."""
    write_json(_path(run), {"version": 1, "thresholds": {**_kept(run), f"{budget:g}": model.method.thresholds}})


def _path(run: Run):
    return run.path / "calibration.json"


def _kept(run: Run) -> dict[str, Any]:
    if not _path(run).exists():
        return {}
    tree = read_json(_path(run))
    sites = sum(site.routed for site in outline(run.config).method.sites(keys=1))
    table = tree.get("thresholds") if isinstance(tree, dict) and tree.get("version") == 1 else None
    if not isinstance(table, dict) or not all(_is_row(row, sites) for row in table.values()):
        raise UserError(f"{_path(run)} is damaged or of another version; remove it and calibrate again")
    return table


def _is_row(row: object, length: int) -> bool:
    return isinstance(row, list) and len(row) == length and all(type(value) is float for value in row)
