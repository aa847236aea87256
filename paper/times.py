"""The time of a training step of what `depth` trains, alone on its device: what loss over training time is drawn from.

from paper.times import times
times(max_minutes=3)                    # repeat it until nothing is left
"""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paper.depth import TIMES, check_names, entries
from paper.grid import Deadline, Progress, missing, same_work, work_of
from paper.search import Search
from tokendepth.config import RunConfig, to_dict
from tokendepth.errors import UserError
from tokendepth.measure.clock import interleaved, quartiles
from tokendepth.methods import build
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows
from tokendepth.training.progress import console
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

BYTES = 256


def times(
    *,
    only: tuple[str, ...] = (),
    quick: bool = False,
    max_minutes: float | None = None,
    results: Path = Path("results"),
    device: str = "auto",
    show: bool = True,
) -> Progress:
    """Give every entry of `depth` a row, dense models first. Nothing else may run on the device meanwhile.

    `only` names the contenders and controls to time now, as in `depth`; none is all.
    """
    if max_minutes is not None and not max_minutes > 0:
        raise UserError(f"--max-minutes is {max_minutes:g}; expected a number above 0")
    check_names(only)
    where, deadline, path = choose_device(device), Deadline.after(max_minutes), results / TIMES
    found = entries(Search.read(results, quick=quick), quick=quick)
    found = [entry for entry in found if not only or entry.setting.method in only]
    todo = missing({entry.setting.title: entry.config for entry in found}, path, by=same_work)
    left = list(todo)
    while left and not deadline.passed():
        row = step_time(todo[left[0]], where)
        add_rows(path, [{"name": left[0], **row}], identity=("config",))
        if show:
            console.print(f"{left[0]}: {row['step_ms'][0]:.2f} ms a step", markup=False, soft_wrap=True)
        del left[0]
    return Progress({}, left)


def step_time(config: RunConfig, device: torch.device) -> Row:
    """Quartiles of an optimiser step on random bytes, compiled on a GPU as in training."""
    on_gpu = device.type == "cuda"
    train = replace(config.train, compile="on" if on_gpu else "off")
    model = build(replace(config, model=replace(config.model, vocab_size=BYTES))).to(device).train()
    step, number = OptimiserStep(model, train, device, Ranks()), itertools.count()
    shape = train.batch_size, config.model.context
    inputs = np.random.default_rng(0).integers(BYTES, size=shape)
    targets = np.roll(inputs, -1, axis=1)
    spent = interleaved(
        {"step": lambda: step(inputs, targets, step=next(number), lr=1e-4)}, 60 if on_gpu else 5, device
    )
    return {"config": to_dict(work_of(config)), "step_ms": quartiles(spent["step"]), **environment(device)}
