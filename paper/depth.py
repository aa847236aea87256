"""Where depth pays: the settings that the search chose, trained at full length with three seeds, run on the test split.

Each method is compared with the line of dense models with 3 to 12 layers, at equal executed and at equal training
FLOPs; thin, deep models and random routing are controls. The runner-up of a few contenders is trained at full length,
too: it shows whether short runs rank settings as long ones do.

    from paper.depth import depth
    depth(max_minutes=9)                    # repeat until nothing is left
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paper import contenders, grid, tables
from paper.contenders import DENSE, LONG, Contender, miniature
from paper.evidence import by_experiment
from paper.grid import Deadline, Progress, same, same_work
from paper.outcomes import Outcomes, interpolate
from paper.search import Search, Tried, wall_clock
from paper.settings import Comparison, Setting
from tokendepth.config import RunConfig, from_dict, override
from tokendepth.errors import UserError, did_you_mean
from tokendepth.methods import dial_of, outline
from tokendepth.runs.results import Row, rows_so_far
from tokendepth.runs.run import Run
from tokendepth.training.progress import console

ROWS, TIMES, PASSES = "depth.json", "step_times.json", "pass_times.json"
Times = dict[str, float]
"""Median milliseconds on one device, by what is computed."""
TOKENS = 2**20
SEEDS = 3
LAYERS = (6, 3, 4, 8, 12)
"""Of dense models; six first, since others are compared with that model by name."""
DICE = {
    "budget": ("random routing", "random", {"method.routing": "random"}),
    "span_rule": (contenders.SPAN_DICE, "span_dice", {"method.decide": "dice"}),
}
"""Controls: the settings chosen for a contender, with random decisions instead of its router."""
ORDER = ("dense", "mod", "budget", "span_rule", "span_boundary")
"""Contenders whose runner-up is trained at full length, too."""


@dataclass(frozen=True)
class Entry:
    """A setting and the run of its first seed."""

    setting: Setting
    config: RunConfig
    rate: float
    value: str
    """Of the contender's knob."""

    def runs(self, seeds: int) -> dict[str, RunConfig]:
        title = self.setting.title
        for shown, older in contenders.FOLDERS.items():
            title = title.replace(shown, older)
        words = title.replace(", ", "-").replace(" ", "_")
        label = f"{words}-lr={self.rate:g}"
        seeded = ((seed, replace(self.config, train=replace(self.config.train, seed=seed))) for seed in range(seeds))
        return {f"{label}-seed{seed}": config for seed, config in seeded}


def entries(search: Search, *, quick: bool = False) -> list[Entry]:
    """All settings for which the search is complete: dense models first, six layers before all others."""
    found = []
    for layers in LAYERS:
        if (rate := search.rate_of_dense(layers)) is not None:
            config = DENSE.config("6 layers", rate, LONG)
            config = replace(config, model=replace(config.model, n_layer=layers))
            found.append(Entry(Setting(f"dense, {layers} layers", "dense", ""), config, rate, f"{layers} layers"))
    for one in contenders.CONTENDERS:
        choice = search.choice(one)
        if one is not DENSE and choice is not None:
            found.append(_entry(choice, f"{one.title}, {choice.value}", one.name, search.target))
            if one.name in DICE:
                title, method, change = DICE[one.name]
                dice = _entry(choice, f"{title}, {choice.value}", method, None)
                found.append(replace(dice, config=override(dice.config, change)))
    return [replace(entry, config=miniature(entry.config)) for entry in found] if quick else found


def runners_up(search: Search, *, quick: bool = False) -> list[Entry]:
    found = []
    for one in contenders.CONTENDERS:
        second = runner_up(search, one)
        if one.name in ORDER and second is not None:
            found.append(_entry(second, f"{one.title}, {second.value}, second", one.name, search.target))
    return [replace(entry, config=miniature(entry.config)) for entry in found] if quick else found


def runner_up(search: Search, one: Contender) -> Tried | None:
    """The second best of a contender's runs; for dense models, of those with six layers, since all lie on the line."""
    tried = search.tried[one] if not search.missing[one] else []
    if one is DENSE:
        tried = sorted((t for t in tried if t.value == "6 layers"), key=lambda t: t.loss)
    return tried[1] if len(tried) > 1 else None


def _entry(tried: Tried, title: str, method: str, target: float | None) -> Entry:
    config = tried.contender.config(tried.value, tried.rate, LONG)
    dial = dial_of(config)
    flops = target if dial is not None and dial.trained else None
    return Entry(Setting(title, method, "", flops=flops), config, tried.rate, tried.value)


def depth(
    *,
    seeds: int = SEEDS,
    only: tuple[str, ...] = (),
    quick: bool = False,
    max_minutes: float | None = None,
    out: Path = Path("runs/depth"),
    results: Path = Path("results"),
    workers: int | None = None,
    show: bool = True,
) -> Progress:
    """Fill the rows of the comparison as far as the search in `results` is complete; run folders go to `out`.

    `only` names the contenders and controls to train now; none means all. Comparisons need the dense models.
    """
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; expected 1 or more")
    if max_minutes is not None and not max_minutes > 0:
        raise UserError(f"--max-minutes is {max_minutes:g}; expected a number above 0")
    check_names(only)
    search, seeds = Search.read(results, quick=quick), 1 if quick else seeds
    wanted = [(entry, seeds) for entry in entries(search, quick=quick)]
    wanted += [(entry, 1) for entry in runners_up(search, quick=quick)]
    chosen = [(entry, count) for entry, count in wanted if not only or entry.setting.method in only]
    configs = {name: config for entry, count in chosen for name, config in entry.runs(count).items()}
    waiting = [one.title for one in contenders.CONTENDERS if search.missing[one]]
    if waiting and show:
        line = f"left out, since the search is not complete: {', '.join(waiting)}; run: python -m paper search"
        console.print(line, markup=False, soft_wrap=True)
    how = {"workers": workers, "quick": quick, "show": show}
    done = fill_on_test(configs, out, results / ROWS, Deadline.after(max_minutes), **how)
    done.left += [f"the search of {title}" for title in waiting]
    return done


def check_names(only: tuple[str, ...]) -> None:
    known = [*(one.name for one in contenders.CONTENDERS), *(method for _, method, _ in DICE.values())]
    if unknown := next((name for name in only if name not in known), None):
        raise UserError(f"--only has {unknown!r}: no such contender; {did_you_mean(unknown, known)}")


def fill_on_test(
    configs: dict[str, RunConfig], out: Path, path: Path, deadline: Deadline, *, quick: bool, **how: Any
) -> Progress:
    """Rows for test text, each with the costs of its model."""
    tokens = tables.MINIATURE_TOKENS if quick else TOKENS
    return grid.fill(configs, out, path, deadline, tokens=tokens, split="test", also=_costs, here=quick, **how)


def _costs(run: Run) -> Row:
    """The columns of a row besides its evaluation."""
    first = replace(run.config, train=replace(run.config.train, seed=0))
    narrower = _full_rows(run) - (run.evaluation or {})["flops_per_token"]
    found: Row = {"training_flops_per_token": _training_flops(first), "narrower_rows_flops_per_token": narrower}
    return found | wall_clock(run)


def _full_rows(run: Run) -> float:
    """Executed FLOPs per token with attention counted over the full context, also for packed tokens."""
    model, shares = outline(run.config), (run.evaluation or {})["sparse"]["active_fraction_per_site"]
    sites = model.method.sites(run.config.model.context)
    spent = (site.always + site.router + share * site.active for site, share in zip(sites, shares, strict=True))
    return model.head_flops + sum(spent)


@functools.cache
def _training_flops(config: RunConfig) -> float:
    from tokendepth.measure.flops import training_flops

    return training_flops(config)


# --- results ----------------------------------------------------------------------------------------------------------


def outcomes(results: Path, *, quick: bool = False) -> tuple[Outcomes, list[Entry]]:
    """The numbers of every entry over its seeds, and the entries."""
    found = entries(Search.read(results, quick=quick), quick=quick)
    return outcomes_of(found, results, ROWS), found


def outcomes_of(found: list[Entry], results: Path, *files: str) -> Outcomes:
    """From the rows of `files`."""
    comparison = Comparison("enwik8, bytes", "enwik8-bytes", SEEDS, tuple(e.setting for e in found), files)
    rows = by_experiment([row for name in files for row in rows_so_far(results / name)])
    return Outcomes(comparison, {entry.setting: entry.config for entry in found}, rows, {})


def device_of(row: Row) -> str:
    return row["device"].removeprefix("NVIDIA ")


def step_times(results: Path) -> dict[str, Times]:
    """Milliseconds per training step, by device."""
    found: dict[str, Times] = {}
    for row in rows_so_far(results / TIMES):
        found.setdefault(device_of(row), {})[same_work(from_dict(row["config"]))] = row["step_ms"][0]
    return dict(sorted(found.items()))


def measured_with(rows: Sequence[Row]) -> str:
    """By device: the versions that were timed."""
    found: dict[str, list[str]] = {}
    for row in rows:
        versions = f"torch {row['torch']}, commit {row['commit']}"
        found[device_of(row)] = list(dict.fromkeys([*found.get(device_of(row), []), versions]))
    return "; ".join(f"{device}: {' and '.join(found[device])}" for device in sorted(found))


def with_steps(found: Outcomes, times: Times) -> Outcomes:
    """The same outcomes with the time per training step."""
    timed: dict[str, dict[int, Row]] = {}
    for experiment, seeds in found.rows.items():
        step = times.get(same_work(from_dict(next(iter(seeds.values()))["config"])), math.nan)
        timed[experiment] = {seed: {**row, "step_ms": step} for seed, row in seeds.items()}
    return replace(found, rows=timed)


@dataclass(frozen=True)
class Order:
    """Two settings of a contender: by how much the second's difference to dense models is above the first's.

    On validation text, seed 0, at equal executed FLOPs, as in the search; None if the long runs are missing.
    """

    contender: Contender
    first: str
    second: str
    short: float
    long: float | None


def order(results: Path, *, quick: bool = False) -> list[Order]:
    """Whether full length keeps the order of the search."""
    search, rows = Search.read(results, quick=quick), by_experiment(rows_so_far(results / ROWS))
    dense = [one.config for one in entries(search, quick=quick) if one.setting.method == "dense"]
    line = sorted(place for config in dense if (place := _after_long_run(rows, config)))

    def difference(tried: Tried) -> float | None:
        config = tried.contender.config(tried.value, tried.rate, LONG)
        place = _after_long_run(rows, miniature(config) if quick else config)
        if place is None or not line:
            return None
        flops, loss = place
        beside = interpolate(line, flops)
        return loss / beside - 1 if isinstance(beside, float) else None

    found = []
    for one in contenders.CONTENDERS:
        best, second = search.choice(one), runner_up(search, one)
        if one is DENSE:
            best = min((t for t in search.tried[one] if t.value == "6 layers"), key=lambda t: t.loss, default=None)
        if one.name not in ORDER or best is None or second is None:
            continue
        first, other = difference(best), difference(second)
        long = None if first is None or other is None else other - first
        name, other_name = (f"{t.value}, {t.rate:g}" for t in (best, second))
        found.append(Order(one, name, other_name, second.difference - best.difference, long))
    return found


def _after_long_run(rows: dict[str, dict[int, Row]], config: RunConfig) -> tuple[float, float] | None:
    """Executed FLOPs and the last loss on validation text, first seed; None if it has not run."""
    row = rows.get(same(config, seed=False), {}).get(0)
    return (row["evaluation"]["flops_per_token"], row["history"][-1]["val_loss"]) if row else None
