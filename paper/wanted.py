"""docs/BUDGET.md: what budget routing was wanted to reach, beside what it does, from results/; a target that resists
stays in the table: python -m paper.wanted
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paper.comparison import wrapped
from paper.outcomes import OUTSIDE, interpolate
from paper.shares import Shares, off, older
from tokendepth.config import BudgetConfig
from tokendepth.report.records import Record
from tokendepth.report.results import at_budgets, records
from tokendepth.report.summary import Stat
from tokendepth.report.tables import piped
from tokendepth.runs.files import write_bytes

NOT_RUN = "not run (on the whole split)"
SAME_COST = 0.03
"""How much more than dense 6 layers counts as their FLOPs."""

INTRODUCTION = """# Budget routing: what was wanted, what was reached

`--method.budget 0.4` names the share of tokens that each routed block works on. Below: executed (hard equals sparse) on
the whole validation split, thresholds calibrated on training text, seed by seed against dense models of the same
shape and learning rate; differences are means with their standard errors. `same FLOPs` is the straight line between
dense models with fewer layers. A target that was missed stays in the table; the [log](LOG.md) has what was tried, with
numbers. On Tiny-Shakespeare budget models are trained by two passes a step, twice the work of a dense step, and what
they gain over dense models is that training's: models with fewer layers that skip nothing and are trained so are better
still at the same FLOPs ([COMPARISON.md](COMPARISON.md)). On enwik8 they are trained by one pass. The share is judged
over all rows of a file with a budget, random routing included; where their thresholds are older than today's
calibration, it says so below the table. Made by `make readme` from [shakespeare.json](../results/shakespeare.json),
[enwik8.json](../results/enwik8.json), [enwik8_faster.json](../results/enwik8_faster.json),
[synthetic.json](../results/synthetic.json) and [depth.json](../results/depth.json).
"""

FIGURES = """## Loss over executed FLOPs

![Tiny-Shakespeare](figures/pareto-shakespeare.png)

![enwik8](figures/pareto-enwik8.png)

enwik8 with a learning rate of 1e-3 for all models:

![enwik8, learning rate 1e-3](figures/pareto-enwik8_faster.png)
"""


@dataclass(frozen=True)
class Runs:
    """The runs of one results file, those with a dial at every budget that tables show."""

    found: list[Record]

    @classmethod
    def read(cls, path: Path) -> "Runs":
        rows = records(path) if path.exists() else []
        dials = [r for r in rows if vars(r.config.method).get("dial")]
        return cls([*at_budgets(dials), *(r for r in rows if r not in dials)])

    def dense(self, layers: int = 6, task: str = "") -> dict[int, Record]:
        kind = f"{task}_dense" if task else "dense"
        return self._seeds(lambda r: _kind(r) == kind and r.config.model.n_layer == layers)

    def of(self, kind: str) -> dict[int, Record]:
        return self._seeds(lambda r: _kind(r) == kind and r.config.model.n_layer == 6)

    def budget(self, budget: float, layers: int = 6, task: str = "", routing: str = "learned") -> dict[int, Record]:
        kind = f"{task}_budget" if task else "budget"

        def fits(record: Record) -> bool:
            knobs = vars(record.config.method)
            named = (knobs.get("budget"), knobs.get("routing")) == (budget, routing)
            return named and _kind(record) == kind and record.config.model.n_layer == layers

        return self._seeds(fits)

    def shares(self) -> list[Shares]:
        """Of every model with a budget, at every budget."""
        found = ((r, r.config.method) for r in self.found)
        return [
            Shares.of(method, method.budget, r.field("hard", "active_fraction_per_site"), r.env)
            for r, method in found
            if isinstance(method, BudgetConfig)
        ]

    def _seeds(self, fits: Callable[[Record], bool]) -> dict[int, Record]:
        found = [record for record in self.found if fits(record)]
        by_seed = {record.config.train.seed: record for record in found}
        assert len(by_seed) == len(found), f"two runs of one seed: {[record.name for record in found]}"
        return by_seed

    def dense_at(self, seed: int, flops: float) -> float | str:
        """The loss of dense models of that cost, by one seed."""
        layers = {r.config.model.n_layer for r in self.found if _kind(r) == "dense"}
        mine = [seeds[seed] for n in layers if seed in (seeds := self.dense(n))]
        return interpolate(sorted((r.needed("flops_per_token"), _loss(r)) for r in mine), flops) if mine else OUTSIDE


def _kind(record: Record) -> str:
    return record.config.recipe.split(".", 1)[-1]


def _loss(record: Record) -> float:
    return record.needed("hard", "loss")


@dataclass(frozen=True)
class Reached:
    words: str
    met: bool
    seeds: int


Judge = Callable[[Runs], Reached | None]
"""None where it was not run."""


@dataclass(frozen=True)
class Target:
    words: str
    wanted: str
    """Empty for a control: nothing is wanted of it."""
    judge: Judge


@dataclass(frozen=True)
class Section:
    title: str
    file: str
    targets: tuple[Target, ...]


def _against_dense(
    budget: float, *, layers: int = 6, routing: str = "learned", at_most: float | None = None, skipped: float = 0.0
) -> Judge:
    """Against six dense layers, seed by seed; `at_most` None asks for no more than one standard error.

    `skipped` is how much of the work has to be; more layers must not cost more than the six.
    """

    def judge(runs: Runs) -> Reached | None:
        mine, dense = runs.budget(budget, layers, routing=routing), runs.dense()
        seeds = sorted(mine.keys() & dense.keys())
        if not seeds:
            return None
        difference = Stat(tuple(_loss(mine[s]) / _loss(dense[s]) - 1 for s in seeds))
        limit = (difference.error or 0.0) if at_most is None else at_most
        enough = all(mine[s].needed("tlops_skipped") >= skipped for s in seeds)
        cost = max(mine[s].needed("flops_per_token") / dense[s].needed("flops_per_token") for s in seeds)
        fair = layers == 6 or cost <= 1 + SAME_COST
        return _reached(difference, [mine[s] for s in seeds], difference.mean <= limit and enough and fair)

    return judge


def _at_same_flops(budget: float, *, at_most: float = 0.0) -> Judge:
    def judge(runs: Runs) -> Reached | None:
        mine = runs.budget(budget)
        beside = {s: runs.dense_at(s, r.needed("flops_per_token")) for s, r in mine.items()}
        seeds = sorted(s for s, loss in beside.items() if loss != OUTSIDE)
        if not seeds:
            return Reached("no dense models beside it", False, len(mine)) if mine else None
        difference = Stat(tuple(_loss(mine[s]) / float(beside[s]) - 1 for s in seeds))
        return _reached(difference, [mine[s] for s in seeds], difference.mean <= at_most)

    return judge


def _accuracy(task: str, budget: float, *, within: float, skipped: float) -> Judge:
    def judge(runs: Runs) -> Reached | None:
        mine, dense = runs.budget(budget, task=task), runs.dense(task=task)
        seeds = sorted(mine.keys() & dense.keys())
        if not seeds:
            return None
        lost = Stat(tuple(dense[s].needed("hard", "accuracy") - mine[s].needed("hard", "accuracy") for s in seeds))
        work = Stat(tuple(mine[s].needed("tlops_skipped") for s in seeds))
        words = f"{work.mean:.1%} skipped, {100 * lost.mean:.2f} point lost"
        return Reached(words, lost.mean <= within and work.mean >= skipped, len(seeds))

    return judge


def _held(*, within: float) -> Judge:
    """The share that was named, in every routed block of every row, on text that no threshold has seen."""

    def judge(runs: Runs) -> Reached | None:
        shares = runs.shares()
        if not shares:
            return None
        seeds = {r.config.train.seed for r in runs.found if isinstance(r.config.method, BudgetConfig)}
        return Reached(off(shares), max(one.off_in_a_block for one in shares) <= within, len(seeds))

    return judge


def _reached(difference: Stat, mine: list[Record], met: bool) -> Reached:
    spread = "" if difference.error is None else f" ± {difference.error:.2%}"
    active, skipped = (
        Stat(tuple(r.needed(*k) for r in mine)).mean for k in (("hard", "active_fraction"), ("tlops_skipped",))
    )
    words = f"{difference.mean:+.2%}{spread} at {active:.3f} active, {skipped:.1%} of the work skipped"
    return Reached(words, met, len(mine))


ERROR, HELD = "at most one standard error", "off by 0.01 at the most"
SHARE = "the share that was named, in every routed block"
ENWIK8 = (
    Target("0.82, at least 13.9% skipped, against dense 6 layers", ERROR, _against_dense(0.82, skipped=0.139)),
    Target(
        "0.4, half of the work skipped, against dense 6 layers",
        "at most +2.0%",
        _against_dense(0.4, at_most=0.02, skipped=0.495),
    ),
    Target(
        "12 layers at 0.34, the FLOPs of dense 6 layers, against those",
        "at least 1.5% better",
        _against_dense(0.34, layers=12, at_most=-0.015),
    ),
    Target("0.4 against dense, same FLOPs", "", _at_same_flops(0.4)),
    Target("the control: random routing at 0.4 against dense 6 layers", "", _against_dense(0.4, routing="random")),
    Target(SHARE, HELD, _held(within=0.01)),
)
SECTIONS = (
    Section(
        "Tiny-Shakespeare",
        "shakespeare.json",
        (
            Target("0.4 against dense 6 layers", "at most +0.5%", _against_dense(0.4, at_most=0.005)),
            Target("0.4 against dense, same FLOPs", "at least 0.8% better", _at_same_flops(0.4, at_most=-0.008)),
            Target("0.25 against dense 6 layers", "at most +0.7%", _against_dense(0.25, at_most=0.007)),
            Target("0.7 against dense 6 layers", ERROR, _against_dense(0.7)),
            Target("the dial at 1 against dense 6 layers", "at most +0.5%", _against_dense(1.0, at_most=0.005)),
            Target("the control: random routing at 0.4", "", _against_dense(0.4, routing="random")),
            Target(SHARE, HELD, _held(within=0.01)),
        ),
    ),
    Section("enwik8", "enwik8.json", ENWIK8),
    Section("enwik8, all models with a learning rate of 1e-3", "enwik8_faster.json", ENWIK8),
    Section(
        "Copy and sort, accuracy within 0.2 point of dense",
        "synthetic.json",
        (
            Target("copy at 0.25", "at least 55% skipped", _accuracy("copy", 0.25, within=0.002, skipped=0.55)),
            Target("sort at 0.4", "at least 22% skipped", _accuracy("sort", 0.4, within=0.002, skipped=0.22)),
            Target(SHARE, HELD, _held(within=0.01)),
        ),
    ),
    Section(
        "enwik8 by bytes, the models of WHERE_DEPTH_PAYS.md",
        "depth.json",
        (Target(SHARE, HELD, _held(within=0.01)),),
    ),
)


def page(results: Path) -> str:
    return "\n".join(
        [INTRODUCTION, *(_table(section, Runs.read(results / section.file)) for section in SECTIONS), FIGURES]
    )


def _table(section: Section, runs: Runs) -> str:
    lines = [["", "wanted", "reached", "seeds", ""], ["---", "---", "---", "--:", "---"]]
    for target in section.targets:
        reached = target.judge(runs)
        cells = [target.words, target.wanted or "\u2014"]
        if reached is None:
            cells += [NOT_RUN, "0", ""]
        else:
            verdict = "" if not target.wanted else "reached" if reached.met else "**missed**"
            cells += [reached.words, str(reached.seeds), verdict]
        lines.append(cells)
    note = older(runs.shares())
    return f"## {section.title}\n\n{piped(lines)}" + (f"\n{wrapped(note)}\n" if note else "")


def write(results: Path, page_path: Path) -> None:
    write_bytes(page_path, page(results).encode())
