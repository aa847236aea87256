"""Claims in the text of the TSA paper, compared with our numbers: soft, as it measures, and with skipping."""

from dataclasses import dataclass

from paper.evidence import NOT_RUN, Evidence, show
from paper.tables import DENSE, ENWIK8_DENSE, ENWIK8_TSA, TSA, penalty
from paper.verdict import LOOSEST
from tokendepth.report.summary import Stat

NONE = "\u2014"


@dataclass(frozen=True)
class _Claim:
    row: str
    """Its name in paper/paper.json."""
    words: str
    form: str
    soft: Stat | None
    executed: Stat | str | None = NONE
    at_most: bool = False


def claims(e: Evidence) -> str:
    """A table with one line per claim."""
    lines = ["| claim | published | ours, soft | ours, with skipping | verdict, soft | verdict, with skipping |"]
    lines.append("|---|--:|--:|--:|---|---|")
    for claim in _claims(e):
        published = e.published("claims", claim.row)["value"]
        said = f"{'at most ' if claim.at_most else ''}{published:{claim.form}}"
        executed = claim.executed if isinstance(claim.executed, str) else show(claim.executed, claim.form)
        verdicts = [NONE if e.quick else _verdict(published, s, claim) for s in (claim.soft, claim.executed)]
        lines.append(
            f"| {claim.words} | {said} | {show(claim.soft, claim.form)} | {executed} | {' | '.join(verdicts)} |"
        )
    return "\n".join(lines)


def _verdict(published: float, ours: Stat | str | None, claim: _Claim) -> str:
    """Within two standard deviations, or within the rounding of the printed number."""
    if ours is None or isinstance(ours, str):
        return NOT_RUN if ours is None else ours
    if claim.at_most:
        return "holds" if ours.mean <= published else "does not hold"
    rounded = 0.005 if claim.form == ".2f" else 0.05 if claim.form == ".1f" else 0.0005
    tolerance = max(min(2 * (ours.std or 0.0), LOOSEST * abs(published)), rounded)
    return "reproduced" if abs(ours.mean - published) <= tolerance else "differs"


def _claims(e: Evidence) -> list[_Claim]:
    def pair(label: str, base: str) -> tuple[Stat | None, Stat | None]:
        return e.against(label, base, "soft", "loss"), e.against(label, base, "hard", "loss")

    def times(*keys: str) -> Stat | None:
        ratio = e.against(penalty(0.05), TSA, *keys)
        return None if ratio is None else Stat(tuple(value + 1 for value in ratio.values))

    start, gate = e.stat(TSA, "soft", "active_fraction", of="initial"), e.timed(condition="soft")
    return [
        _Claim("router overhead", "parameters added by the routers", "+.1%", e.against(TSA, DENSE, "parameters")),
        _Claim(
            "halting probability at initialisation",
            "halting probability before training",
            ".2f",
            start and Stat(tuple(1 - value for value in start.values)),
        ),
        _Claim("TSA on Shakespeare", "loss relative to dense, Shakespeare", "+.1%", *pair(TSA, DENSE)),
        _Claim("TSA on enwik8", "loss relative to dense, enwik8", "+.1%", *pair(ENWIK8_TSA, ENWIK8_DENSE)),
        _Claim(
            "loss at penalty 0.05 against the baseline, at most",
            "loss relative to dense at penalty 0.05",
            "+.1%",
            *pair(penalty(0.05), DENSE),
            at_most=True,
        ),
        _Claim(
            "TLOps saved at penalty 0.05 against 0.001",
            "TLOps saved at penalty 0.05, as a multiple of those saved at 0.001",
            ".1f",
            times("tlops_saved_soft"),
            times("tlops_skipped"),
        ),
        _Claim("loss at penalty 0.5", "loss relative to dense at penalty 0.5", "+.1%", *pair(penalty(0.5), DENSE)),
        _Claim(
            "soft TSA overhead",
            "time added to a forward pass by soft gates",
            "+.1%",
            Stat((1 / gate["speedup"] - 1,)) if gate else None,
        ),
    ]
