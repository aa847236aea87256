"""The results of each setting of a comparison: numbers over seeds, costs, and dense models of the same cost."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paper import settings
from paper.costs import keys_and_values
from paper.evidence import by_experiment
from paper.grid import same
from paper.settings import SAME_FLOPS, SAME_PARAMETERS, Comparison, Setting
from paper.shares import Shares
from tokendepth.config import BudgetConfig, RunConfig, from_dict
from tokendepth.report.summary import Stat
from tokendepth.runs.results import Row, rows_so_far

COSTS = "compare_costs.json"
OUTSIDE = "outside"
Cost = Literal["flops_per_token", "full_rows_flops", "training_flops", "step_ms"]
Beside = tuple[Stat, Stat] | Literal["outside"] | None
"""Loss of dense models at the same cost and the difference to it, if dense models are on both sides of that cost."""


@dataclass(frozen=True)
class Executed:
    """One seed of a setting, with real skipping."""

    seed: int
    loss: float
    active_fraction: float
    tlops_skipped: float
    flops_per_token: float
    flops_skipped: float
    """Relative to the same model with every block taken; NaN if the row does not have it."""
    parameters: int
    training_flops: float
    """Per token, forward and backward; NaN if the row does not have it."""
    full_rows_flops: float
    """Like `flops_per_token`, with attention counted over the full context also if a method packs its tokens."""
    step_ms: float
    """Per training step, with nothing else on the device; NaN if it was not timed."""
    val_loss: float
    """On validation text, at the end of training; NaN if the row does not have it."""
    kv_bytes: float
    """Keys and values per token in float32."""
    kv_bytes_reserved: float
    """The same if every token left them in every block: the cache has fixed shapes."""


@dataclass(frozen=True)
class Outcomes:
    comparison: Comparison
    configs: dict[Setting, RunConfig]
    """Of the first seed."""
    rows: dict[str, dict[int, Row]]
    """By experiment, then by seed."""
    costs: dict[tuple[str, float | None], Row]
    """By experiment and point of its curve."""

    @classmethod
    def read(cls, results: Path, comparison: Comparison, *, quick: bool = False) -> "Outcomes":
        def rows(name: str) -> list[Row]:
            return rows_so_far(results / name)

        configs = {
            setting: next(iter(settings.runs(setting, comparison.corpus, 1, quick=quick).values()))
            for setting in comparison.settings
        }
        costs = {(_experiment(from_dict(row["config"])), row["at"]): row for row in rows(COSTS)}
        return cls(comparison, configs, by_experiment([r for name in comparison.files for r in rows(name)]), costs)

    def _seeds(self, setting: Setting) -> dict[int, Row]:
        """Those that all dense models have, if they share any; at a point of a curve, those that have the point."""
        ran = self.rows.get(_experiment(self.configs[setting]), {})
        dense = [set(self.rows.get(_experiment(self.configs[one]), {})) for one in self.of("dense")]
        shared = set.intersection(*dense)
        found = {seed: row for seed, row in ran.items() if not shared or seed in shared}
        if setting.chosen_by_work:  # the point is chosen from the curve
            return {seed: row for seed, row in found.items() if row["evaluation"]["curve"]}
        return {seed: row for seed, row in found.items() if _point(row, setting.budget)}

    def first_row(self, setting: Setting) -> Row | None:
        return self._seeds(setting).get(0)

    def cost(self, setting: Setting) -> Row | None:
        row = self.first_row(setting)
        return None if row is None else self.costs.get((_experiment(self.configs[setting]), setting.point(row)))

    def costs_of(self, setting: Setting) -> dict[str, float] | None:
        """The costs of a setting besides its executed FLOPs; its time, if it was measured, relative to dense.

        From its row of costs, or from the row of its run if that has them.
        """
        row = self.cost(setting) or self.first_row(setting)
        parameters, kept = (self.stat(setting, name) for name in ("parameters", "kv_bytes"))
        if row is None or parameters is None or kept is None or "training_flops_per_token" not in row:
            return None
        model, train = self.configs[setting].model, self.configs[setting].train
        tokens = train.steps * train.batch_size * model.context
        costs = {
            "training FLOPs": row["training_flops_per_token"] * tokens,
            "parameters": parameters.mean,
            "K/V": kept.mean,
        }
        return costs | ({"time": 1 / row["time"]["speedup"]} if "time" in row else {})

    def executed(self, setting: Setting) -> list[Executed]:
        """By seed; a setting that is chosen on its first seed needs that seed."""
        first = self.first_row(setting)
        if first is None:
            return []
        at, seeds = setting.point(first), self._seeds(setting)
        found = ((seed, seeds[seed], _point(seeds[seed], at)) for seed in sorted(seeds))
        config = self.configs[setting]
        return [_executed(seed, row, figures, config) for seed, row, figures in found if figures]

    def stat(self, setting: Setting, name: str) -> Stat | None:
        values = tuple(getattr(one, name) for one in self.executed(setting))
        return Stat(values) if values else None

    def shares(self) -> list[Shares]:
        """Executed shares of every setting with a budget, seed by seed."""
        return [
            Shares.of(
                method,
                setting.budget or method.budget,
                point["sparse"]["active_fraction_per_site"],
                row["evaluated_on"],
            )
            for setting, config in self.configs.items()
            if isinstance(method := config.method, BudgetConfig)
            for row in self._seeds(setting).values()
            if (point := _point(row, setting.budget))
        ]

    def curve(self, setting: Setting) -> list[tuple[float, float, float]]:
        """FLOPs per token, mean loss and its standard deviation at every point of a model's curve, cheapest first."""
        curves = [row["evaluation"]["curve"] for row in self._seeds(setting).values()]
        places = []
        for points in zip(*curves, strict=True) if all(curves) else ():
            cost, loss = (
                Stat(tuple(p["flops_per_token"] for p in points)),
                Stat(tuple(p["sparse"]["loss"] for p in points)),
            )
            places.append((cost.mean, loss.mean, loss.std or 0.0))
        return sorted(places)

    def has_matched_parameters(self, setting: Setting) -> bool:
        mine, dense = (self.stat(one, "parameters") for one in (setting, self.comparison.settings[0]))
        return mine is not None and dense is not None and abs(mine.mean / dense.mean - 1) <= SAME_PARAMETERS

    # -- the dense models

    def of(self, method: str) -> list[Setting]:
        return [setting for setting in self.comparison.settings if setting.method == method]

    def beside(self, setting: Setting, line: str = "dense", by: Cost = "flops_per_token") -> Beside:
        """Seed by seed, on the line through the dense models with that seed, so that luck with the data is in both.

        `line` may be another method that skips nothing; `by` is the cost that is held equal.
        """
        pairs = list(self._pairs(setting, self.of(line), by))
        if not pairs:
            return None
        if any(dense == OUTSIDE for _, dense in pairs):
            return OUTSIDE
        dense = Stat(tuple(float(dense) for _, dense in pairs))
        return dense, Stat(tuple(loss / float(dense) - 1 for loss, dense in pairs))

    def against_six_layers(self, setting: Setting) -> Stat | None:
        """The difference to the dense model with six layers, seed by seed, at whatever cost."""
        dense = {one.seed: one.loss for one in self.executed(self.comparison.settings[0])}
        values = tuple(one.loss / dense[one.seed] - 1 for one in self.executed(setting) if one.seed in dense)
        return Stat(values) if values else None

    def _pairs(self, setting: Setting, line_of: list[Setting], by: Cost) -> Iterator[tuple[float, float | str]]:
        """Each loss with that on the line of the dense models that ran; seeds that one of these lacks are left out."""
        by_seed: dict[int, list[tuple[float, float]]] = {}
        line_of = [layers for layers in line_of if self.executed(layers)]
        for layers in line_of:
            for one in self.executed(layers):
                if not math.isnan(cost := getattr(one, by)):
                    by_seed.setdefault(one.seed, []).append((cost, one.loss))
        for one in self.executed(setting):
            line = sorted(by_seed.get(one.seed, []))
            if line and len(line) == len(line_of) and not math.isnan(getattr(one, by)):
                yield one.loss, interpolate(line, getattr(one, by))


def interpolate(line: list[tuple[float, float]], x: float, *, beyond: float = SAME_FLOPS) -> float | str:
    """Linear interpolation of `line` at `x`, or `outside`.

    Up to `beyond` past an end the value of the end counts: routers cost a little more than the layers they control.
    """
    places = [place for place, _ in line]
    if not places[0] * (1 - beyond) <= x <= places[-1] * (1 + beyond):
        return OUTSIDE
    right = bisect.bisect_left(places, x)
    if right in (0, len(line)):
        return line[min(right, len(line) - 1)][1]
    (x0, y0), (x1, y1) = line[right - 1], line[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _experiment(config: RunConfig) -> str:
    return same(config, seed=False)


def _point(row: Row, at: float | None) -> Row | None:
    """The evaluation of a row, or one point of its curve; without a dial that is the evaluation, too."""
    points = row["evaluation"]["curve"]
    if at is None or (not points and row["evaluation"].get("budget") == at):
        return row["evaluation"]
    return next((point for point in points if at in (point.get("budget"), point.get("threshold"))), None)


def _executed(seed: int, row: Row, figures: Row, config: RunConfig) -> Executed:
    stored, reserved = keys_and_values(config, figures["sparse"]["active_fraction_per_site"])
    return Executed(
        seed=seed,
        loss=figures["sparse"]["loss"],
        active_fraction=figures["sparse"]["active_fraction"],
        tlops_skipped=figures["tlops_skipped"],
        flops_per_token=figures["flops_per_token"],
        flops_skipped=figures.get("flops_skipped", math.nan),
        parameters=row["evaluation"]["parameters"],
        training_flops=row.get("training_flops_per_token", math.nan),
        full_rows_flops=figures["flops_per_token"] + row.get("narrower_rows_flops_per_token", 0.0),
        step_ms=row.get("step_ms", math.nan),
        val_loss=row["history"][-1]["val_loss"] if row.get("history") else math.nan,
        kv_bytes=stored,
        kv_bytes_reserved=reserved,
    )
