"""The first screen in words: what was trained, how much is skipped, and what that changes in loss and speed.

Every number comes from evaluations with real skipping (hard = sparse), none from soft gates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokendepth.report.summary import NOISE_SHARE, Row, Stat, by_key, rows
from tokendepth.runs.run import Run

MOST = 3
"""Maximum number of models in one sentence."""


@dataclass(frozen=True)
class Clause:
    """The part of the sentence about one model."""

    row: Row
    words: str


@dataclass(frozen=True)
class Headline:
    """One sentence: what was trained, then a clause for each model that was executed."""

    opening: str
    clauses: tuple[Clause, ...]
    closing: str
    timed: str
    """Device and batch size of the timings; empty if there are none."""

    @property
    def text(self) -> str:
        return self.opening + "; ".join(f"{c.row.label} {c.words}" for c in self.clauses) + self.closing


def sentences(runs: list[Run]) -> list[str]:
    """One sentence per corpus."""
    return [headline(members).text for members in by_corpus(rows(runs)).values()]


def by_corpus(table: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by corpus, since losses on different texts cannot be compared."""
    found: dict[str, list[Row]] = {}
    for row in table:
        found.setdefault(row.corpus, []).append(row)
    return found


def headline(members: Sequence[Row]) -> Headline:
    """The headline for the rows of one corpus."""
    were = "was" if len(members) == 1 else "were"
    imported = all(record.imported for row in members for record in row.records)
    how = "imported" if imported else f"trained on {members[0].corpus}{_steps(members)}"
    opening = f"{_names(members)} {were} {how}"
    evaluated = [row for row in members if row.stat(by_key("loss_hard"))]
    routed = [row for row in evaluated if any(record.routed for record in row.records)]
    if not evaluated:
        return Headline(f"{opening}, but not evaluated yet (run tokendepth evaluate)", (), ".", "")
    if not routed:
        words = "and nothing is skipped: without routers every token goes through every layer"
        where = f" on {members[0].corpus}" if imported else ""
        said = f"has a validation loss{where} of"
        clauses = tuple(Clause(row, f"{said} {_loss(row).mean:.4f}") for row in evaluated[:MOST])
        return Headline(f"{opening}, {words}; ", clauses, _more(evaluated), "")
    best = sorted(routed, key=lambda row: _loss(row).mean)[:MOST]
    shown = [row for row in routed if row in best]
    clauses = tuple(Clause(row, _clause(row, reference(row, evaluated))) for row in shown)
    timed = sorted({row.timed for row in shown if row.stat(by_key("speedup"))})
    return Headline(f"{opening}; with real skipping, ", clauses, _more(routed), "; ".join(timed))


def reference(row: Row, members: Sequence[Row]) -> Row | None:
    """The dense model to compare `row` with: same shape, trained for as long on the same text."""

    def alike(one: Row) -> tuple:
        config = one.records[0].config
        return one.corpus, config.model, config.train.steps, config.train.batch_size

    return next((one for one in members if one.method == "dense" and alike(one) == alike(row)), None)


def _names(members: Sequence[Row]) -> str:
    labels = [row.label for row in members]
    if len(labels) > MOST + 1:
        return f"{len(labels)} models"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _steps(members: Sequence[Row]) -> str:
    steps = {row.records[0].config.train.steps for row in members}
    return f" for {steps.pop():,} steps" + (" each" if len(members) > 1 else "") if len(steps) == 1 else ""


def _more(members: Sequence[Row]) -> str:
    return f"; {len(members) - MOST} more below." if len(members) > MOST else "."


def _loss(row: Row) -> Stat:
    stat = row.stat(by_key("loss_hard"))
    assert stat is not None, row.label
    return stat


def _clause(row: Row, dense: Row | None) -> str:
    return f"{_skipped(row)}, {_cost(row, dense)}, and {_clock(row)}"


def _skipped(row: Row) -> str:
    work, flops = row.stat(by_key("tlops_skipped")), row.stat(by_key("flops_skipped"))
    said = "skips nothing" if work is None or work.mean < 0.0005 else f"skips {work.mean:.1%} of the work"
    if flops is None:
        return said
    if flops.mean < 0:
        return f"{said} and takes {-flops.mean:.1%} more FLOPs than dense"
    return f"{said} and {flops.mean:.1%} of the FLOPs"


def _cost(row: Row, dense: Row | None) -> str:
    loss = _loss(row)
    said = f"has a validation loss of {loss.mean:.4f}"
    if dense is None:
        return said
    other = _loss(dense)
    share = loss.mean / other.mean - 1
    if abs(share) < NOISE_SHARE and min(len(loss.values), len(other.values)) < 3:
        return f"{said}, not clearly different from dense ({other.mean:.4f})"
    return f"{said}, {abs(share):.1%} {'below' if share < 0 else 'above'} dense ({other.mean:.4f})"


def _clock(row: Row) -> str:
    speed = row.stat(by_key("speedup"))
    if speed is None:
        return "was not timed"
    if row.times_overlap:
        return "is not clearly faster or slower than dense (their times overlap)"
    if speed.mean < 1:
        return f"is slower than dense ({speed.mean:.2f}x its speed)"
    return f"is {speed.mean:.2f}x as fast as dense"
