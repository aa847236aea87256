"""Rows of the results table: runs that differ only in their seed are one row, and every number states its mode.

Soft and hard numbers are in different columns, and the title of a column names its mode. TLOps saved by soft gates are
only a weighting; work that was really skipped has its own columns.
"""

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tokendepth.config import method_name, to_dict
from tokendepth.errors import UserError
from tokendepth.report.records import Record
from tokendepth.runs.run import Run

DASH = "—"
COLLAPSE = 0.02
"""If the hard loss exceeds the soft one by more than this, the soft results do not hold when tokens are skipped."""
MISMATCH = 0.001
"""Hard and sparse agree up to rounding; if they differ by more than this, the column `hard = sparse` is wrong."""
NOISE_SHARE = 0.009
NOISE = f"differences under {NOISE_SHARE:.1%} are noise"


@dataclass(frozen=True)
class Stat:
    """One number per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.std is None else self.std / math.sqrt(len(self.values))

    def text(self, form: str) -> str:
        """Mean and spread: `1.4439 ± 0.0052`."""
        spread = "" if self.std is None else f" ± {self.std:{form.removeprefix('+')}}"
        return f"{self.mean:{form}}{spread}"


@dataclass(frozen=True)
class Column:
    key: str
    group: Literal["", "soft", "executed"]
    title: str
    """Used by itself, so it names the mode."""
    short: str
    """Used below its group's heading."""
    pick: Callable[[Record], float | None]
    style: str
    """A format specification."""
    optional: bool = False
    """Shown only if some run has it."""


def _routed(*keys: str) -> Callable[[Record], float | None]:
    """Only for runs with routers, since a dense model is the baseline."""
    return lambda record: record.number(*keys) if record.routed else None


def _soft(*keys: str) -> Callable[[Record], float | None]:
    return lambda record: record.number(*keys) if record.has_soft else None


def _executed(*keys: str) -> Callable[[Record], float | None]:
    return lambda record: record.number(*keys)


COLUMNS = (
    Column("parameters", "", "params", "params", _executed("parameters"), ",.0f"),
    Column("loss_soft", "soft", "loss (soft)", "loss", _soft("soft", "loss"), ".4f"),
    Column("active_fraction_soft", "soft", "active fraction (soft)", "active fraction",
           _soft("soft", "active_fraction"), ".3f"),
    Column("tlops_saved_soft", "soft", "TLOps saved (soft, weighting only)", "TLOps saved (weighting only)",
           _soft("tlops_saved_soft"), ".1%"),
    Column("loss_hard", "executed", "loss (hard = sparse)", "loss", _executed("hard", "loss"), ".4f"),
    Column("active_fraction_hard", "executed", "active fraction (hard)", "active fraction",
           _executed("hard", "active_fraction"), ".3f"),
    Column("tlops_skipped", "executed", "token-layer work skipped", "token-layer work skipped",
           _executed("tlops_skipped"), ".1%"),
    Column("flops_skipped", "executed", "FLOPs skipped", "FLOPs skipped", _executed("flops_skipped"), ".1%"),
    Column("flops_per_token", "executed", "FLOPs per token, executed", "FLOPs per token",
           _executed("flops_per_token"), ",.0f"),
    Column("speedup", "executed", "speed vs dense (measured; above 1 is faster)", "speed vs dense (above 1 is faster)",
           _routed("time", "speedup"), ".2f"),
    Column("bits_per_character", "executed", "bits per char (hard)", "bits per char",
           _executed("hard", "bits_per_character"), ".4f"),
    Column("bits_per_byte", "executed", "bits per byte (hard)", "bits per byte",
           _executed("hard", "bits_per_byte"), ".4f"),
    Column("accuracy", "executed", "accuracy (hard)", "accuracy", _executed("hard", "accuracy"), ".4f", optional=True),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Runs of one config with different seeds."""

    label: str
    records: tuple[Record, ...]

    @property
    def method(self) -> str:
        return method_name(self.records[0].config.method)

    @property
    def kind(self) -> str:
        """What its colour means: the method, or `random` for the control with random decisions."""
        return "random" if getattr(self.records[0].config.method, "routing", None) == "random" else self.method

    @property
    def corpus(self) -> str:
        return self.records[0].corpus

    @property
    def title(self) -> str:
        return self.label + (f" (n={len(self.records)})" if len(self.records) > 1 else "")

    def stat(self, column: Column) -> Stat | None:
        values = tuple(v for v in map(column.pick, self.records) if v is not None)
        return Stat(values) if values else None

    def numbers(self, column: Column) -> list[str]:
        """The parts of a cell: mean, spread and, for a speed, what was timed."""
        stat = self.stat(column)
        if stat is None:
            return [DASH]
        times = "x" if column.key == "speedup" else ""
        parts = [format(stat.mean, column.style) + times]
        if stat.std is not None and column.key != "parameters":
            parts.append("± " + format(stat.std, column.style))
        if len(stat.values) < len(self.records):
            parts.append(f"(n={len(stat.values)})")
        if column.key == "speedup":
            parts.append(f"({self.timed}{'; times overlap' if self.times_overlap else ''})")
        return parts

    def cell(self, column: Column) -> str:
        return " ".join(self.numbers(column))

    @property
    def timed(self) -> str:
        """Device and batch size of the timing; a speedup without them means nothing."""
        conditions = {
            f"{r.field('time', 'device') or 'device unknown'}, batch {r.field('time', 'batch') or 'unknown'}"
            for r in self.records
            if r.number("time", "speedup") is not None
        }
        return conditions.pop() if len(conditions) == 1 else "devices or batches differ"

    @property
    def times_overlap(self) -> bool:
        """Whether it is unclear which is faster, because the times of a seed overlap or because seeds disagree."""
        speeds = self.stat(by_key("speedup"))
        disagree = speeds is not None and len({speed > 1 for speed in speeds.values}) > 1
        return disagree or any(record.times_overlap for record in self.records)

    @property
    def collapses(self) -> bool:
        """Whether, for any seed, quality is lost when the decisions are executed instead of used as weights."""
        return any(_exceeds(r, "hard") or _exceeds(r, "sparse") for r in self.records if r.routed)

    @property
    def mismatch(self) -> bool:
        pairs = ((r.number("hard", "loss"), r.number("sparse", "loss")) for r in self.records)
        return any(h is not None and s is not None and abs(h - s) > MISMATCH * abs(h) for h, s in pairs)


def _exceeds(record: Record, mode: str) -> bool:
    soft, executed = record.number("soft", "loss"), record.number(mode, "loss")
    return soft is not None and executed is not None and executed > soft * (1 + COLLAPSE)


def rows(runs: list[Run]) -> list[Row]:
    """One row per config, in the order given."""
    if not runs:
        raise UserError("no runs were given; expected at least one run folder; name them: tokendepth report RUN ...")
    return group([Record.read(run) for run in {run.path.resolve(): run for run in runs}.values()])


def group(records: list[Record]) -> list[Row]:
    groups: dict[str, dict[int, Record]] = {}
    for record in records:
        tree = to_dict(record.config)
        seed = tree["train"].pop("seed")
        key = json.dumps(tree, sort_keys=True)
        while seed in groups.get(key, {}):  # the same seed again is not a second sample, so it gets its own row
            key += " again"
        groups.setdefault(key, {})[seed] = record
    taken: list[Row] = []
    for members in groups.values():
        seeds = tuple(members.values())
        label, used = _label(seeds), {row.label for row in taken}
        again = (f"{label} ({number})" for number in itertools.count(2))
        taken.append(Row(next(name for name in itertools.chain([label], again) if name not in used), seeds))
    return taken


def _label(records: tuple[Record, ...]) -> str:
    """The run's name; for several seeds the common part: tsa-seed0 and tsa-seed1 are tsa."""
    if len(records) == 1:
        return records[0].name
    letters = zip(*(record.name for record in records), strict=False)
    shared = "".join(same[0] for same in itertools.takewhile(lambda letter: len(set(letter)) == 1, letters))
    config = records[0].config
    return re.sub(r"([-_. ]+(seed|s)?|seed)[-_=]*\d*$", "", shared) or config.recipe or method_name(config.method)


def columns(table: list[Row]) -> list[Column]:
    return [c for c in COLUMNS if not c.optional or any(row.stat(c) for row in table)]


def notes(table: list[Row]) -> list[str]:
    """Notes that a reader needs to judge the numbers; shown with every table."""
    found = []
    if collapsed := [row.label for row in table if row.collapses]:
        found.append(
            f"† collapses when executed ({', '.join(collapsed)}): the hard loss exceeds the soft loss by more than "
            f"{COLLAPSE:.0%}, so the savings in the soft columns cannot be realised without losing quality."
        )
    if apart := [row.label for row in table if row.mismatch]:
        found.append(f"sparse differs from hard ({', '.join(apart)}): losses differ by over {MISMATCH:.1%}, a bug.")
    if any(len(row.records) > 1 for row in table):
        found.append("mean ± sample standard deviation over n seeds.")
    sampled = {row.label: len(stat.values) for row in table if (stat := row.stat(by_key("loss_hard")))}
    for count, word in ((1, "one seed"), (2, "two seeds")):
        few = [label for label, n in sampled.items() if n == count]
        if few:
            found.append(("" if len(few) == len(table) else ", ".join(few) + ": ") + f"{word}: {NOISE}.")
    records = [record for row in table for record in row.records]
    found += [line for record in records if (line := _before_and_after(record))]
    if unfinished := [f"{r.name} (step {r.step:,} of {r.config.train.steps:,})" for r in records if not r.finished]:
        found.append(f"not finished: {', '.join(unfinished)}.")
    if unknown := [r.name for r in records if not r.evaluation]:
        found.append(f"not evaluated: {', '.join(unknown)}.")
    return found


def _before_and_after(record: Record) -> str | None:
    """For a retrofit: the loss of the untouched model on the same text, and the losses after the retrofit."""
    before, after = (record.number(name, "loss") for name in ("untouched", "sparse"))
    share = record.number("block_flops")
    if before is None or after is None or share is None:
        return None
    curve = record.evaluation.get("curve", [])
    full = next((f", {point['sparse']['loss']:.4f} at full budget" for point in curve if point.get("budget") == 1), "")
    return f"{record.name}: loss {before:.4f} before the retrofit, {after:.4f} at {share:.3f} of its block FLOPs{full}."


def by_key(key: str) -> Column:
    return next(column for column in COLUMNS if column.key == key)
