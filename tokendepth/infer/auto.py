"""Choose the faster execution on this machine: skipping, or running the same weights densely.

Skipping pays off once enough tokens are skipped; how many depends on the machine and the input shape. Both are timed
the first time a shape is seen on a machine (about a second), and the profile is stored in the cache folder.
"""

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from tokendepth.infer import profiles
from tokendepth.infer.packed import PackedPasses, by_itself
from tokendepth.measure.clock import captured, interleaved
from tokendepth.model import LanguageModel
from tokendepth.ops.launch import LOW_PRECISION
from tokendepth.runs.shapes import POSITIVE, Kind, Object, is_number
from tokendepth.trace import Execution

FRACTIONS = (0.1, 0.4, 0.7, 1.0)
REPEATS = 5
TIMES = Kind(
    "a time for each fraction",
    lambda value: isinstance(value, list) and len(value) == len(FRACTIONS) and all(map(is_number, value)),
)
PROFILE = Object(needed={"hard_ms": POSITIVE, "sparse_ms": TIMES})


@dataclass(frozen=True)
class Choice:
    execution: Execution
    reason: str


def choose(
    model: LanguageModel, batch: int, time_steps: int, active_fraction: float, *, remembered: bool = True
) -> Choice:
    """`sparse` if it is expected to be faster at this active fraction, else `hard`, which computes the same densely.

    Even with nothing to skip, `sparse` can be faster, since it uses different kernels on a GPU. Pass the model in the
    form in which it will run, for example compiled. `remembered=False` measures again.
    """
    own_kernels = model.norm.weight.is_cuda and model.norm.weight.dtype in LOW_PRECISION
    if not any(site.routed for site in model.method.sites(keys=1)) and not own_kernels:
        return Choice("hard", "this model has no routers, so there is nothing to skip")
    profile = _profile(model, batch, time_steps, remembered)
    hard, sparse = profile["hard_ms"], _interpolated(profile["sparse_ms"], active_fraction)
    words = f"{sparse:.2f} ms sparse and {hard:.2f} ms dense at active fraction {active_fraction:.2f}, batch {batch}"
    return Choice("sparse" if sparse < hard else "hard", f"measured here: {words}")


def _interpolated(times: list[float], at: float) -> float:
    """Linear between the measured fractions, constant outside them."""
    if at <= FRACTIONS[0]:
        return times[0]
    for (low, a), (high, b) in zip(
        zip(FRACTIONS, times, strict=True), zip(FRACTIONS[1:], times[1:], strict=True), strict=False
    ):
        if at <= high:
            return a + (b - a) * (at - low) / (high - low)
    return times[-1]


def _profile(model: LanguageModel, batch: int, time_steps: int, remembered: bool) -> dict[str, Any]:
    def measure() -> dict[str, Any]:
        return _measured(model, batch, time_steps)

    return profiles.remembered("profile.json", model, [batch, time_steps], measure, PROFILE, again=not remembered)


@torch.no_grad()
def _measured(model: LanguageModel, batch: int, time_steps: int) -> dict[str, Any]:
    """Median times of interleaved forward passes with random tokens and random decisions."""
    device = model.norm.weight.device
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, time_steps), generator=dice).to(device)
    sites = sum(site.routed for site in model.method.sites(keys=1))
    draws = torch.rand(sites, batch, time_steps, generator=dice)
    forced = [model.forcing((draws < fraction).to(device)) for fraction in FRACTIONS]
    conditions = {0.0: lambda: model(ids, execution="hard", **forced[0])}
    for fraction, decided in zip(FRACTIONS, forced, strict=True):
        own = by_itself(model)
        conditions[fraction] = lambda own=own, decided=decided: own(ids, execution="sparse", **decided)
    graphs = model.can_be_captured
    if graphs:
        still = {name: run for name, run in conditions.items() if name == 0.0 or not isinstance(model, PackedPasses)}
        conditions |= {name: captured(run, device) for name, run in still.items()}
    hard, *sparse = map(statistics.median, interleaved(conditions, REPEATS, device, graphs=graphs).values())
    return {"hard_ms": hard, "sparse_ms": sparse}
