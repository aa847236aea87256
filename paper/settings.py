"""The settings that are compared: every method at two budgets, dense models with fewer layers, and random routing.

The budgets are shares of the token-layer work of the dense model with six layers: about one half, so three layers per
token, and about three quarters. Some methods take a budget, others only an incentive; the tables show what each
executed. A method that repeats its layers gets fewer of them, so that it executes as much as the others.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

from paper import tables
from tokendepth.config import DenseConfig, RunConfig
from tokendepth.recipes import variants
from tokendepth.runs.results import Row

Level = Literal["half", "mild", "any"]
"""The budget that a setting aims at; any if it aims at none."""
LAYERS = (6, 5, 4, 3, 2)
SAME_FLOPS = 0.03
"""How far the line of dense models may be extended beyond its last model, as a share of the FLOPs."""
SAME_PARAMETERS = 0.04
"""Parameters count as matched within this share of the dense model's."""


@dataclass(frozen=True)
class Setting:
    """One row of the tables: a trained model, executed in one way."""

    title: str
    method: str
    """The method on whose page it appears; `random` and `two_passes` are controls."""
    cell: str
    """In the syntax of `sweep`, without the corpus; empty if a study makes its own configs."""
    level: Level = "any"
    budget: float | None = None
    """The budget to execute, for a model that supports several."""
    skips: float | None = None
    """For a model with exits: execute at the threshold that skips this share of the work."""
    flops: float | None = None
    """For a model with a curve: take the point that executes about this many FLOPs per token."""
    matched: bool = False
    """With a feed-forward network wide enough to match the dense model's parameters."""

    def point(self, row: Row) -> float | None:
        """The point on the curve of a run; if the work decides, it is chosen from the row of the first seed."""
        if not self.chosen_by_work:
            return self.budget
        key, wanted = ("tlops_skipped", self.skips) if self.flops is None else ("flops_per_token", self.flops)
        nearest = min(row["evaluation"]["curve"], key=lambda point: abs(point[key] - wanted))
        return nearest["threshold"]

    @property
    def chosen_by_work(self) -> bool:
        return self.skips is not None or self.flops is not None


def _dense(layers: int) -> Setting:
    return Setting(f"dense, {layers} layers", "dense", f"dense:model.n-layer={layers}" if layers < 6 else "dense")


def _two_passes(layers: int) -> Setting:
    """Trained like budget routing on Shakespeare, but with nothing skipped: the effect of the training by itself."""
    cell = "budget:method.budget=1:method.dial=False" + (f":model.n-layer={layers}" if layers < 6 else "")
    return Setting(f"two passes, {layers} layers", "two_passes", cell)


def _learned_exits(oracle: str) -> tuple[Setting, Setting]:
    title, cell = f"early exit by {oracle}", f"early_exit:method.exit=learned:method.oracle={oracle}"
    return (
        Setting(f"{title}, half", "early_exit", cell, "half", skips=0.5),
        Setting(f"{title}, a quarter", "early_exit", cell, "mild", skips=0.25),
    )


SETTINGS = (
    *(_dense(layers) for layers in LAYERS),
    Setting("random routing, budget 0.4", "random", "budget:method.routing=random", "half", budget=0.4),
    Setting("random routing, budget 0.7", "random", "budget:method.routing=random", "mild", budget=0.7),
    Setting("TSA, penalty 0.05", "tsa", "tsa:method.depth-penalty=0.05", "half"),
    Setting("TSA, penalty 0.001", "tsa", "tsa:method.depth-penalty=0.001", "mild"),
    Setting("budget 0.4", "budget", "budget", "half", budget=0.4),
    Setting("budget 0.7", "budget", "budget", "mild", budget=0.7),
    # Two forward passes on half of the sequences cost as much as a dense step.
    Setting("budget 0.4, half the batch", "budget", "budget:train.batch-size=32", budget=0.4),
    *(_two_passes(layers) for layers in (6, 4, 3)),
    Setting("early exit by confidence, half", "early_exit", "early_exit", "half", skips=0.5),
    Setting("early exit by confidence, a quarter", "early_exit", "early_exit", "mild", skips=0.25),
    *_learned_exits("correctness"),
    *_learned_exits("likelihood"),
    Setting("MoD, capacity 0.125", "mod", "mod", "half"),
    Setting("MoD, capacity 0.5", "mod", "mod:method.capacity=0.5", "mild"),
    Setting("MoR, 4 layers, 2 recursions", "mor", "mor:model.n-layer=4:method.recursions=2", "half"),
    Setting("MoR, 6 layers, 4 recursions", "mor", "mor:method.recursions=4", "mild"),
    Setting("MoR, 6 layers, 4 recursions, wide", "mor", "mor:method.recursions=4", matched=True),
    Setting("ACT, ponder cost 0.01", "act", "act", "half"),
    Setting("ACT, ponder cost 0.001", "act", "act:method.ponder-cost=0.001", "mild"),
    Setting("ACT, ponder cost 0.01, wide", "act", "act", matched=True),
    Setting("ITT, 2 layers, 2 steps", "itt", "itt:model.n-layer=2:method.steps=2", "half"),
    Setting("ITT, 3 layers, 3 steps", "itt", "itt:model.n-layer=3:method.steps=3", "mild"),
    Setting("ITT, 6 layers, 4 steps", "itt", "itt"),
    Setting("Switch, 4 experts", "switch", "switch"),
    Setting("Switch, 4 experts, narrow", "switch", "switch", matched=True),
)


@dataclass(frozen=True)
class Comparison:
    title: str
    corpus: str
    seeds: int
    settings: tuple[Setting, ...]
    files: tuple[str, ...]
    """Files with rows of the same experiments, in order of precedence; new rows go into the first."""


RUNS = "compare.json"
SHAKESPEARE = Comparison(
    "Tiny-Shakespeare", "shakespeare", 3, SETTINGS, (RUNS, "reproduction.json", "shakespeare.json")
)
"""On enwik8 the methods are compared by a study that tunes them all the same way (`depth.py`)."""


def runs(setting: Setting, corpus: str, seeds: int, *, quick: bool = False) -> dict[str, RunConfig]:
    """One per seed, by name."""
    found = variants(f"{corpus}.{setting.cell}", seeds)
    if quick:  # keep all layers: their number is compared
        small = {name: tables.miniature(config, layers=max(LAYERS)) for name, config in found.items()}
        found = {n: replace(c, train=replace(c.train, eval_every=c.train.steps)) for n, c in small.items()}
    return {_renamed(name, made): made for name, made in _matched(found).items()} if setting.matched else found


def _matched(found: dict[str, RunConfig]) -> dict[str, RunConfig]:
    return {
        name: replace(config, model=replace(config.model, d_ff=_matching_width(_seedless(config))))
        for name, config in found.items()
    }


def _renamed(name: str, config: RunConfig) -> str:
    return f"{tables.label_of(name)}-d_ff={config.model.d_ff}-seed{config.train.seed}"


def _seedless(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, seed=0))


@functools.cache
def _matching_width(config: RunConfig) -> int:
    """The feed-forward width, a multiple of 8, at which `config` has as many parameters as the dense model."""
    wanted = _parameters(replace(config, method=DenseConfig()))
    narrow, wide = (_parameters(replace(config, model=replace(config.model, d_ff=width))) for width in (8, 16))
    return 8 + 8 * round((wanted - narrow) / (wide - narrow))


def _parameters(config: RunConfig) -> int:
    """With a vocabulary of one token, since the embedding is the same for all."""
    from tokendepth.methods import build

    model = build(replace(config, model=replace(config.model, vocab_size=1)))
    return sum(parameter.numel() for parameter in model.parameters())
