"""docs/BUDGET.md: targets of budget routing, met or missed, from results/: python -m paper.wanted"""

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
"""Up to this share more FLOPs than six dense layers count as the same FLOPs."""

INTRODUCTION = """# Budget routing: targets met and missed

`--method.budget 0.4` sets the share of tokens that each routed block processes.

{answer}

Losses are those with real skipping (hard equals sparse) on the whole validation split, with thresholds calibrated on
training text. They are compared seed by seed with dense models of the same shape and learning rate; differences are
means with standard errors. "Same FLOPs" is the straight line between dense models with fewer layers. Missed targets
stay in the table; [LOG.md](LOG.md) has what was tried, with numbers.

On Tiny-Shakespeare budget models are trained with two forward passes per step, which is twice the work of a dense step,
and their gain over dense models comes from that training: models with fewer layers that skip nothing and are trained
the same way are better still at the same FLOPs ([COMPARISON.md](COMPARISON.md)). On enwik8 they are trained with one.

The share of tokens is checked for all rows of a file that have a budget, including random routing. If thresholds come
from an older calibration, a note below the table says so. `make readme` generates this page from
[shakespeare.json](../results/shakespeare.json), [enwik8.json](../results/enwik8.json),
[enwik8_faster.json](../results/enwik8_faster.json), [synthetic.json](../results/synthetic.json) and
[depth.json](../results/depth.json).
"""

FIGURES = """## Loss over executed FLOPs

![Tiny-Shakespeare](figures/pareto-shakespeare.png)

![enwik8](figures/pareto-enwik8.png)

enwik8 with a learning rate of 1e-3 for all models:

![enwik8, learning rate 1e-3](figures/pareto-enwik8_faster.png)
"""


@dataclass(frozen=True)
class Runs:
    """The runs of one results file; those with a dial appear at every budget of the tables."""

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
        """Those of every model with a budget, at every budget."""
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
        """The loss of dense models with the same FLOPs and seed."""
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
"""None if it was not run."""


@dataclass(frozen=True)
class Target:
    words: str
    wanted: str
    """Empty for a control, which has no target."""
    judge: Judge


@dataclass(frozen=True)
class Section:
    title: str
    file: str
    targets: tuple[Target, ...]


def _against_dense(
    budget: float, *, layers: int = 6, routing: str = "learned", at_most: float | None = None, skipped: float = 0.0
) -> Judge:
    """Compared with six dense layers, seed by seed; `at_most` None allows one standard error.

    `skipped` is the share of the work that must be skipped; more layers must not cost more than the six.
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
            return Reached("no dense models to compare with", False, len(mine)) if mine else None
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
        words = f"{work.mean:.1%} skipped, {100 * lost.mean:.2f} points lost"
        return Reached(words, lost.mean <= within and work.mean >= skipped, len(seeds))

    return judge


def _held(*, within: float) -> Judge:
    """The configured share in every routed block of every row, on text that calibration did not see."""

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


ERROR, HELD = "at most one standard error", "off by at most 0.01"
SHARE = "the configured share, in every routed block"
ENWIK8 = (
    Target("0.82, at least 13.9% skipped, vs. dense, 6 layers", ERROR, _against_dense(0.82, skipped=0.139)),
    Target(
        "0.4, half of the work skipped, vs. dense, 6 layers",
        "at most +2.0%",
        _against_dense(0.4, at_most=0.02, skipped=0.495),
    ),
    Target(
        "12 layers at 0.34 vs. dense, 6 layers, same FLOPs",
        "at least 1.5% better",
        _against_dense(0.34, layers=12, at_most=-0.015),
    ),
    Target("0.4 vs. dense, same FLOPs", "", _at_same_flops(0.4)),
    Target("control: random routing at 0.4 vs. dense, 6 layers", "", _against_dense(0.4, routing="random")),
    Target(SHARE, HELD, _held(within=0.01)),
)
SECTIONS = (
    Section(
        "Tiny-Shakespeare",
        "shakespeare.json",
        (
            Target("0.4 vs. dense, 6 layers", "at most +0.5%", _against_dense(0.4, at_most=0.005)),
            Target("0.4 vs. dense, same FLOPs", "at least 0.8% better", _at_same_flops(0.4, at_most=-0.008)),
            Target("0.25 vs. dense, 6 layers", "at most +0.7%", _against_dense(0.25, at_most=0.007)),
            Target("0.7 vs. dense, 6 layers", ERROR, _against_dense(0.7)),
            Target("the dial at 1 vs. dense, 6 layers", "at most +0.5%", _against_dense(1.0, at_most=0.005)),
            Target("control: random routing at 0.4", "", _against_dense(0.4, routing="random")),
            Target(SHARE, HELD, _held(within=0.01)),
        ),
    ),
    Section("enwik8", "enwik8.json", ENWIK8),
    Section("enwik8, learning rate 1e-3 for all models", "enwik8_faster.json", ENWIK8),
    Section(
        "Copy and sort, accuracy within 0.2 points of dense",
        "synthetic.json",
        (
            Target("copy at 0.25", "at least 55% skipped", _accuracy("copy", 0.25, within=0.002, skipped=0.55)),
            Target("sort at 0.4", "at least 22% skipped", _accuracy("sort", 0.4, within=0.002, skipped=0.22)),
            Target(SHARE, HELD, _held(within=0.01)),
        ),
    ),
    Section(
        "enwik8 bytes, the models of WHERE_DEPTH_PAYS.md",
        "depth.json",
        (Target(SHARE, HELD, _held(within=0.01)),),
    ),
)


def page(results: Path) -> str:
    found = [(section, Runs.read(results / section.file)) for section in SECTIONS]
    head = INTRODUCTION.format(answer=_answer(found))
    return "\n".join([head, *(_table(section, runs) for section, runs in found), FIGURES])


def _answer(found: list[tuple[Section, Runs]]) -> str:
    """How many targets are met."""
    said = []
    for section, runs in found:
        judged = [reached for target in section.targets if target.wanted and (reached := target.judge(runs))]
        if judged:
            said.append(f"{section.title}: {sum(one.met for one in judged)} of {len(judged)}")
    return wrapped(f"**Targets met.** {'; '.join(said) or NOT_RUN}.")


def _table(section: Section, runs: Runs) -> str:
    lines = [["", "target", "result", "seeds", "met?"], ["---", "---", "---", "--:", "---"]]
    for target in section.targets:
        reached = target.judge(runs)
        cells = [target.words, target.wanted or "\u2014"]
        if reached is None:
            cells += [NOT_RUN, "0", ""]
        else:
            verdict = "" if not target.wanted else "met" if reached.met else "**missed**"
            cells += [reached.words, str(reached.seeds), verdict]
        lines.append(cells)
    note = older(runs.shares())
    return f"## {section.title}\n\n{piped(lines)}" + (f"\n{wrapped(note)}\n" if note else "")


def write(results: Path, page_path: Path) -> None:
    write_bytes(page_path, page(results).encode())
