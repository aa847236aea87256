"""Timings of Llama-style models that have not been repeated since dense and skipping ones became faster."""

import textwrap

from tokendepth.runs.results import Row

ROTARY = "measured before compiled models with rotary positions became faster"
SINCE = {
    "fd7021624b45+changes": ROTARY,
    "71303722fd3a": ROTARY,
    "c91dbc33eef9+changes": ROTARY,
    "9390e89c31a0": "measured before decoding on a CPU kept weights packed",
}
"""By the commits of their rows."""
SHAPE = "smollm2"


def older(rows: list[Row]) -> str:
    """A paragraph for below a table of `rows`, if the speedup of one of them might be another today; else empty."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["shape"].startswith(SHAPE) and row["commit"] in SINCE:
            found.setdefault(SINCE[row["commit"]], []).append(row["run"] or row["shape"])
    if not found:
        return ""
    said = "; ".join(f"{', '.join(dict.fromkeys(who))}, {since}" for since, who in found.items())
    note = f"Not timed again: {said}. That helps dense and skipping models alike, so ratios may differ ([log](LOG.md))."
    return f"\n{textwrap.fill(note, 120, break_long_words=False, break_on_hyphens=False)}\n"
