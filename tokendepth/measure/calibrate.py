"""Find thresholds for a budget on training text, never on the text that a model is evaluated on."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tokendepth.checks import check_budget
from tokendepth.config import RunConfig, method_name
from tokendepth.data import Dataset
from tokendepth.data.of_run import dataset_of
from tokendepth.errors import UserError
from tokendepth.methods import dial_of, outline
from tokendepth.model import Block, LanguageModel
from tokendepth.progress import Progress
from tokendepth.runs.files import write_sealed
from tokendepth.runs.run import Run
from tokendepth.runs.shapes import is_number

FIRST_TOKENS, FEWEST_WINDOWS, MOST_TOKENS = 2**15, 32, 2**19
WANTED_ERROR = 0.003
"""Target for the standard error of each routed block's share of active tokens; windows are added until all blocks meet
it, up to the maximum.

How many are needed depends on the text. Windows of plays are much alike. Those of an encyclopaedia, with its tables and
foreign words, are not: for a requested share of 0.40, 128 windows of 256 characters give between 0.39 and 0.43.
"""
AT_ONCE = 2**14
"""Tokens per forward pass; the states of more would not fit into every machine's memory."""
SEED = 2**31
"""A seed that no training run can have, so that calibration draws other windows than training."""
VERSION = 2
"""Version of calibration.json, which is sealed since version 2."""
TOLERATED = 0.05
"""A share of active tokens further than this from the budget is reported."""


def calibrate(
    model: LanguageModel,
    dataset: Dataset,
    budget: float | None = None,
    *,
    roughly: bool = False,
    show: bool = False,
) -> None:
    """Set the thresholds of `model` so that `budget` (by default its own) holds on training text.

    `roughly` is fast and uses only the first windows. `show` prints progress.
    """
    dial, context = model.method.dial(model.config, model.method.config), model.config.context
    if dial is None or not dial.calibrated:
        return
    budget, windows = budget or dial.own, max(FEWEST_WINDOWS, FIRST_TOKENS // context)
    was_training = model.training
    model.eval()

    def look_at(count: int) -> Tensor:
        ids = _windows(dataset, count, context)
        with _shown(model, f"finding thresholds for budget {budget:g}", ids, show=show):
            return calibrate_on(model, ids, budget)

    try:
        wanted = math.ceil(float(look_at(windows).var(-1).max()) / WANTED_ERROR**2)
        if wanted > windows and not roughly:
            look_at(min(wanted, max(FEWEST_WINDOWS, MOST_TOKENS // context)))
    finally:
        model.train(was_training)


@contextlib.contextmanager
def _shown(model: LanguageModel, title: str, ids: Tensor, *, show: bool) -> Iterator[None]:
    """Progress of `calibrate_on`, which runs every block once for each part of the text."""
    blocks = [module for module in model.method.modules() if isinstance(module, Block)]
    passes = len(blocks) * len(ids.split(_at_once(ids)))
    with Progress(title, passes, unit="block passes", show=show) as progress, contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(lambda *_: progress.advance()))
        yield


def _windows(dataset: Dataset, count: int, context: int) -> Tensor:
    ids, _ = dataset.train_batch(seed=SEED, step=0, batch_size=count, context=context)
    return torch.from_numpy(ids)


@torch.no_grad()
def calibrate_on(model: LanguageModel, ids: Tensor, budget: float) -> Tensor:
    """Set the thresholds so that the share `budget` of `ids` is active; returns the result of `Method.calibrate`."""
    entering = [model.entering(part, "hard") for part in ids.to(model.norm.weight.device).split(_at_once(ids))]
    _, ctx = entering[0]
    return model.method.calibrate([hidden for hidden, _ in entering], ctx, budget)


def _at_once(ids: Tensor) -> int:
    return max(1, AT_ONCE // ids.shape[1])


def set_budget(
    model: LanguageModel, run: Run, budget: float, dataset: Dataset | None = None, *, show: bool = False
) -> None:
    """Set the model of `run` to `budget`, with stored thresholds if there are any, else with new ones."""
    check(run, budget)
    kept = kept_thresholds(run).get(f"{budget:g}")
    if kept is None:
        with Progress("reading the corpus", show=show):
            dataset = dataset or dataset_of(run)
        calibrate(model, dataset, budget, show=show)
    else:
        model.method.set_thresholds(kept)


def off_budget(budget: float, share: float, tokens: int) -> str | None:
    """One line that explains why the share of active tokens differs from the budget; None if it does not."""
    if abs(share - budget) <= TOLERATED:
        return None
    return (
        f"budget {budget:g} was asked for, but {share:.3f} of these {tokens:,} tokens were active: thresholds hold the "
        "budget on average over training text; this text scores differently, and short texts vary more"
    )


def check(run: Run, budget: float) -> None:
    check_budget("budget", budget)
    if not has_budget(run.config):
        name = method_name(run.config.method)
        raise UserError(f"{run.path} has no budget to set, as its method {name} decides; shakespeare.budget has one")


def has_budget(config: RunConfig) -> bool:
    """Whether a model of this config can run with a given share of active tokens."""
    dial = dial_of(config)
    return dial is not None and dial.calibrated


def keep(model: LanguageModel, run: Run, budget: float) -> None:
    """Store the model's thresholds in the run folder, so that it can run at `budget` without its corpus."""
    thresholds = {**kept_thresholds(run), f"{budget:g}": model.method.thresholds}
    write_sealed(run.path / "calibration.json", {"version": VERSION, "thresholds": thresholds})


def kept_thresholds(run: Run) -> dict[str, Any]:
    """Thresholds by budget, as stored by `keep`."""
    remedy = f"remove it and find the thresholds again: tokendepth calibrate {run.path} --budget BUDGET"
    tree = run.read_added("calibration.json", VERSION, remedy)
    table = {} if tree is None else tree.get("thresholds")
    sites = sum(site.routed for site in outline(run.config).method.sites(keys=1))
    if not isinstance(table, dict) or not all(_is_row(row, sites) for row in table.values()):
        raise UserError(f"{run.path / 'calibration.json'} is damaged: no {sites} thresholds for each budget; {remedy}")
    return table


def _is_row(row: object, length: int) -> bool:
    return isinstance(row, list) and len(row) == length and all(map(is_number, row))
