"""The time per training step of what `depth` trains, with nothing else on the device; training times follow from it.

Models are compiled on every device, which is also faster on a CPU. All models of a call take turns, so that drift
affects all of them; what is compared must be timed in one call. On a GPU a turn is several steps in a row, since the
first one runs after another model's graph and weights. Rows are written at the end.

    from paper.times import times
    times(only=("budget", "mod"))           # nothing else may run on the device
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paper.depth import TIMES, check_names, entries
from paper.grid import Progress as Done
from paper.grid import work_of
from paper.search import Search
from tokendepth.config import RunConfig, to_dict
from tokendepth.errors import UserError
from tokendepth.measure.clock import WARM_UP, interleaved, quartiles
from tokendepth.methods import build
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment, freed_memory_kept
from tokendepth.runs.results import add_rows
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

BYTES = 256
REPEATS = {"cuda": 15, "cpu": 5}
IN_A_ROW = {"cuda": 20, "cpu": 1}


def times(
    *,
    only: tuple[str, ...] = (),
    quick: bool = False,
    results: Path = Path("results"),
    device: str = "auto",
    show: bool = True,
) -> Done:
    """A row for every dense model and every contender or control in `only`, on this device; none means all."""
    check_names(only)
    where, found = choose_device(device), entries(Search.read(results, quick=quick), quick=quick)
    if not found:
        raise UserError(f"{results} has no complete search yet; run: python -m paper search")
    found = [entry for entry in found if not only or entry.setting.method in ("dense", *only)]
    repeats, in_a_row = REPEATS[where.type], IN_A_ROW[where.type]
    # Otherwise models beyond the limit would be timed uncompiled.
    with freed_memory_kept(where), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        steps = {}
        with Progress("steps: compiling", len(found), unit="models", show=show) as progress:
            for entry in found:
                steps[entry] = _steps(entry.config, where, in_a_row)
                steps[entry]()
                progress.advance()
        with Progress("steps: timing", WARM_UP + repeats, unit="rounds", show=show) as progress:
            spent = interleaved(steps, repeats, where, progress=progress)
    rows = []
    for entry, turns in spent.items():
        about = {"name": entry.setting.title, "config": to_dict(work_of(entry.config))}
        rows.append({**about, "step_ms": quartiles([turn / in_a_row for turn in turns]), **environment(where)})
    add_rows(results / TIMES, rows, identity=("config", "device"))
    return Done()


def _steps(config: RunConfig, device: torch.device, count: int) -> Callable[[], object]:
    """Steps on random bytes: their cost does not depend on the text."""
    model = build(replace(config, model=replace(config.model, vocab_size=BYTES))).to(device).train()
    step = OptimiserStep(model, replace(config.train, compile="on"), device, Ranks())
    inputs = np.random.default_rng(0).integers(BYTES, size=(config.train.batch_size, config.model.context))
    targets, numbers = np.roll(inputs, -1, axis=1), itertools.count()
    return lambda: [step(inputs, targets, step=next(numbers), lr=1e-4) for _ in range(count)]
