"""Of docs/RETROFIT.md: how fast retrofitted models are, from forward.json and decode.json in results/.

A retrofitted run counts as one of a base where its folder is called BASE-..., such as smollm2-span-0.7.
"""

from pathlib import Path

from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN
from tokendepth.report.summary import DASH
from tokendepth.runs.results import Row, rows_so_far

PREFILL, DECODE = "prefill", "decode"
EFFICIENCY = 0.85
"""Wanted of a prefill on a GPU; on a CPU and of decoding: faster than the dense model."""
NOTE = (
    "A pass over a text, and one token more after it, each against the fastest dense run of the same shape on the same "
    "device (SPEED.md). `at most` is by FLOPs for a pass and by bytes read for a token. Where no retrofitted model was "
    "timed stands the base's shape with a router for each block and random decisions."
)


def section(results: Path, base: str) -> str:
    lines = _lines(results, base, "forward", PREFILL) + _lines(results, base, "decode", DECODE)
    titles = ["", "model", "device", "batch", "active", "dense, ms", "skipping, ms", "speedup", "at most", "wanted"]
    if not lines:
        lines = [[NOT_RUN, *[""] * (len(titles) - 1)]]
    return f"### Speed\n\n{wrapped(NOTE)}\n\n{table(titles, lines, words=3)}"


def _lines(results: Path, base: str, name: str, what: str) -> list[list[str]]:
    path = results / f"{name}.json"
    rows = [row for row in rows_so_far(path) if row["execution"] == "sparse"]
    own = [row for row in rows if (row["run"] or "").startswith(f"{base}-")]
    timed = {row["device"] for row in own}
    shape = [row for row in rows if row["shape"] == base and row["run"] is None and row["device"] not in timed]
    return [_line(row, what) for row in sorted(own, key=_place) + sorted(shape, key=_place)]


def _place(row: Row) -> tuple:
    return row["device"].startswith("CPU"), row["batch"], row["asked"] or 0


def _line(row: Row, what: str) -> list[str]:
    model = row["run"] or "its shape, random decisions"
    times = f"{row['dense_ms'][0]:.2f}", f"{row['sparse_ms'][0]:.2f}"
    cells = [what, model, row["device"], f"{row['batch']} x {row['context']:,}", f"{row['active_fraction']:.3f}"]
    return [*cells, *times, f"{row['speedup']:.2f}x", f"{row['ceiling']:.2f}x", _verdict(row, what)]


def _verdict(row: Row, what: str) -> str:
    if row["efficiency"] is None:  # nothing was skipped
        return DASH
    if what == PREFILL and not row["device"].startswith("CPU"):
        found = row["efficiency"]
        return f"efficiency {EFFICIENCY:g}: {_met(found >= EFFICIENCY)} ({found:.2f})"
    return f"faster than dense: {_met(row['speedup'] > 1)}"


def _met(reached: bool) -> str:
    return "reached" if reached else "**missed**"
