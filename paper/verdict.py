"""The rule by which a published number is called reproduced, written once for the code and for the reader."""

from typing import Literal

from tokendepth.report.summary import Stat

Verdict = Literal["reproduced", "differs", "not supported", "not run", "other machine"]

TOLERANCE, LOOSEST = 0.01, 0.1
RULE = """\
- **reproduced**: our mean lies within two standard deviations of our seeds, or within 1% of the published value,
  whichever is more, but never more than 10% away: seeds that scatter are no excuse. With one seed there is no
  deviation, and the 1% alone counts. A count must be equal.
- **differs**: it does not.
- **not supported**: the number is a saving, and our model that repeats it does not have it when it is executed. For
  token-layer operations: executed at its own threshold (hard), its loss is more than 2% above its soft loss, or for
  copy and sort its accuracy more than one point below. For a speed-up: the paper is faster than its dense baseline,
  and ours is slower than ours in three of four passes or more. A speed-up of at least the published one, less 1%, is
  reproduced.
- **other machine**: milliseconds of another machine, shown but not judged.
- **not run**: there is no row in `results/` yet."""


def judge(published: float, ours: Stat | None, *, saving: bool = False, collapses: bool | None = None) -> Verdict:
    """`saving` marks a number that only execution can give; `collapses` whether execution takes it back."""
    if ours is None:
        return "not run"
    if saving and collapses and published > 0:
        return "not supported"
    tolerance = min(max(2 * (ours.std or 0.0), TOLERANCE * abs(published)), LOOSEST * abs(published))
    if isinstance(published, int):
        tolerance = 0.0
    return "reproduced" if abs(ours.mean - published) <= tolerance else "differs"


def judge_speedup(published: float, ours: float | None, upper_quartile: float) -> Verdict:
    if ours is None:
        return "not run"
    if ours >= published * (1 - TOLERANCE):
        return "reproduced"
    return "not supported" if published > 1 and upper_quartile < 1 else "differs"
