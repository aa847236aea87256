"""What a finding is, and how the numbers in one are put."""

from dataclasses import dataclass

from paper.evidence import NOT_RUN, Evidence
from tokendepth.report.summary import Stat


@dataclass(frozen=True)
class Finding:
    title: str
    verdict: str
    text: str


def holds(*answers: bool | None) -> str:
    """The verdict on a claim from what was found soft, then hard."""
    names = ("soft", "executed")
    said = [
        f"{name}: {NOT_RUN if answer is None else 'holds' if answer else 'does not hold'}"
        for name, answer in zip(names, answers, strict=True)
    ]
    return "; ".join(said).capitalize() + "."


def relative(new: Stat | None, old: Stat | None) -> str:
    return NOT_RUN if new is None or old is None else f"{new.mean / old.mean - 1:+.2%}"


def apart(e: Evidence, table: str, other: str = "baseline") -> float:
    """By how much TSA's published loss is above another of its table."""
    return e.published(table, "TSA")["loss"] - e.published(table, other)["loss"]


def steps(found: list[int | None]) -> str:
    """One step a seed, or one for all that agree."""
    if not found:
        return NOT_RUN
    said = ["never" if step is None else f"{step:,}" for step in found]
    return said[0] if len(set(said)) == 1 else " / ".join(said)
