"""The speed section of docs/RETROFIT.md, from forward.json and decode.json in results/.

A retrofitted run belongs to a base if its folder is called BASE-..., such as smollm2-span-0.7.
"""

from pathlib import Path

from benchmarks.older import older
from paper.comparison import table, wrapped
from paper.evidence import NOT_RUN
from tokendepth.report.summary import DASH
from tokendepth.runs.results import Row, rows_so_far

PREFILL, DECODE = "prefill", "decode"
EFFICIENCY = 0.85
"""Target for prefill on a GPU; on a CPU and for decoding the target is to be faster than the dense model."""
NOTE = (
    "Prefill and one decoding step, each compared with the fastest dense run of the same shape on the same device "
    "([SPEED.md](SPEED.md)). `at most` is the speedup that the skipped FLOPs (prefill) or bytes (decode) would allow; "
    "`efficiency` is the share of that gain which was measured."
)
SHAPE = "its shape, random decisions"
UNTIMED = (
    f" `{SHAPE}`: no retrofitted model was timed on that device, so the row shows the base's shape with one router per "
    "block and random decisions."
)


def section(results: Path, base: str) -> str:
    lines = _lines(results, base, "forward", PREFILL) + _lines(results, base, "decode", DECODE)
    titles = ["", "model", "device", "batch", "active", "dense, ms", "skipping, ms", "speedup", "at most", "target"]
    if not lines:
        lines = [[NOT_RUN, *[""] * (len(titles) - 1)]]
    note = NOTE + (UNTIMED if any(line[1] == SHAPE for line in lines) else "")
    rows = [row for name in ("forward", "decode") for row in _rows(results, base, name)]
    return f"### Speed\n\n{wrapped(note)}\n\n{table(titles, lines, words=3)}{older(rows)}"


def summary(results: Path, run: str) -> str:
    """A sentence about prefill with this run; nothing if it was not timed."""
    rows = [row for row in rows_so_far(results / "forward.json") if (row["run"], row["execution"]) == (run, "sparse")]
    said = [f"{row['speedup']:.2f}x on {row['device']}, batch {row['batch']}" for row in sorted(rows, key=_place)]
    return f" Prefill speed relative to dense: {'; '.join(said)}." if said else ""


def _lines(results: Path, base: str, name: str, what: str) -> list[list[str]]:
    return [_line(row, what) for row in _rows(results, base, name)]


def _rows(results: Path, base: str, name: str) -> list[Row]:
    path = results / f"{name}.json"
    rows = [row for row in rows_so_far(path) if row["execution"] == "sparse"]
    own = [row for row in rows if (row["run"] or "").startswith(f"{base}-")]
    timed = {row["device"] for row in own}
    shape = [row for row in rows if row["shape"] == base and row["run"] is None and row["device"] not in timed]
    return sorted(own, key=_place) + sorted(shape, key=_place)


def _place(row: Row) -> tuple:
    return row["device"].startswith("CPU"), row["batch"], row["asked"] or 0


def _line(row: Row, what: str) -> list[str]:
    model = row["run"] or SHAPE
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


def _met(met: bool) -> str:
    return "met" if met else "**missed**"
