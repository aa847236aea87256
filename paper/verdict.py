"""The rule that decides whether a published number is reproduced, stated once for the code and for the page."""

from typing import Literal

from tokendepth.report.summary import Stat

Verdict = Literal["reproduced", "differs", "not supported", "not run", "other machine"]

TOLERANCE, LOOSEST = 0.01, 0.1
RULE = """\
- **reproduced**: our mean is within two standard deviations (over our seeds) or within 1% of the published value,
  whichever is wider, but never more than 10% away, however much the seeds vary. With one seed only the 1% counts.
  Counts must be equal.
- **differs**: it is not.
- **not supported**: the number is a saving, and our model does not have it once tokens are really skipped. For
  token-layer operations (TLOps): with skipping at the model's own threshold, the loss is more than 2% higher than
  without; for copy and sort, the accuracy is more than one point lower. For a speed-up: the paper is faster than its
  dense baseline, but at least three quarters of our forward passes are slower than our dense baseline. A speed-up of
  at least the published one, minus 1%, counts as reproduced.
- **other machine**: milliseconds measured on another machine; shown, not judged.
- **not run**: no row in `results/` yet."""


def judge(published: float, ours: Stat | None, *, saving: bool = False, collapses: bool | None = None) -> Verdict:
    """`saving`: the number is only real if tokens are skipped; `collapses`: skipping costs the quality."""
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
