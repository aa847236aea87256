"""The rows of results/retrofit.json, by base, contender, budget and seed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paper.outcomes import interpolate
from paper.retrofit import CONTENDERS, base_title
from tokendepth.config import RunConfig, from_dict
from tokendepth.report.summary import Stat
from tokendepth.runs.results import Row, rows_so_far


@dataclass(frozen=True)
class Base:
    """The rows of one base: by contender and budget, then by seed."""

    name: str
    config: RunConfig
    """Of any row."""
    rows: dict[tuple[str, float], dict[int, Row]]

    def values(self, name: str, budget: float | None, pick: Callable[[Row], float | None]) -> dict[int, float]:
        """By seed; over all budgets if none is named."""
        found = {}
        for (contender, at), seeds in self.rows.items():
            if contender == name and budget in (None, at):
                found |= {seed: value for seed, row in seeds.items() if (value := pick(row)) is not None}
        return found

    def stat(self, name: str, budget: float | None, pick: Callable[[Row], float | None]) -> Stat | None:
        values = tuple(self.values(name, budget, pick).values())
        return Stat(values) if values else None

    def any(self, pick: Callable[[Row], float | None]) -> Stat | None:
        """What all contenders have in common, from the first that has it."""
        return next((stat for one in CONTENDERS if (stat := self.stat(one.name, None, pick))), None)

    def at_cost(self, name: str, seed: int, cost: float) -> float | str:
        """The loss of a contender at a share of block FLOPs, or a note that its budgets are too far from it."""
        line = [(1.0, value) for own, value in self.values("dense", None, loss).items() if own == seed]
        for budget in self.budgets:
            costs, losses = (self.values(name, budget, pick) for pick in (block_flops, loss))
            line += [(costs[seed], losses[seed])] if seed in costs and seed in losses else []
        return interpolate(sorted(line), cost)

    @property
    def title(self) -> str:
        return base_title(self.name)

    @property
    def layers(self) -> int:
        """Blocks of the base, also if the config is that of a model without some of them."""
        return self.config.model.n_layer + (self.config.retrofit.drop if self.config.retrofit else 0)

    @property
    def distills(self) -> set[float]:
        found = (from_dict(row["config"]).retrofit for seeds in self.rows.values() for row in seeds.values())
        return {retrofit.distill for retrofit in found if retrofit is not None}

    @property
    def budgets(self) -> list[float]:
        return sorted({budget for _, budget in self.rows}, reverse=True)


def loss(row: Row) -> float | None:
    return row["evaluation"]["sparse"]["loss"]


def block_flops(row: Row) -> float | None:
    return row["evaluation"].get("block_flops")


def full_budget(row: Row) -> float | None:
    return row.get("full_budget_loss")


def untouched_loss(row: Row) -> float | None:
    return row["evaluation"].get("untouched", {}).get("loss")


def tokens(row: Row) -> float | None:
    return row["evaluation"].get("tokens")


def bases(path: Path) -> list[Base]:
    found: dict[str, Base] = {}
    for row in rows_so_far(path):
        config = from_dict(row["config"])
        assert config.retrofit is not None
        name, budget, _ = row["name"].rsplit("-", 2)
        base = found.setdefault(config.retrofit.sha256, Base(Path(config.retrofit.base).name, config, {}))
        base.rows.setdefault((name, float(budget)), {})[config.train.seed] = row
    return list(found.values())
