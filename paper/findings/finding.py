"""A finding, and how its numbers are written."""

from dataclasses import dataclass

from paper.evidence import NOT_RUN, Evidence
from tokendepth.report.summary import Stat


@dataclass(frozen=True)
class Finding:
    title: str
    verdict: str
    text: str
    table: str = ""
    """Shown below the text."""


def holds(*answers: bool | None) -> str:
    """The verdict on a claim, soft and with skipping."""
    names = ("soft", "with skipping")
    said = [
        f"{name}: {NOT_RUN if answer is None else 'holds' if answer else 'does not hold'}"
        for name, answer in zip(names, answers, strict=True)
    ]
    return "; ".join(said).capitalize() + "."


def relative(new: Stat | None, old: Stat | None) -> str:
    return NOT_RUN if new is None or old is None else f"{new.mean / old.mean - 1:+.2%}"


def apart(e: Evidence, table: str, other: str = "baseline") -> float:
    """TSA's published loss minus that of another row of the table."""
    return e.published(table, "TSA")["loss"] - e.published(table, other)["loss"]


def steps(found: list[int | None]) -> str:
    """One step per seed, or a single one if all agree."""
    if not found:
        return NOT_RUN
    said = ["never" if step is None else f"{step:,}" for step in found]
    return said[0] if len(set(said)) == 1 else " / ".join(said)
