"""The table of docs/SPECULATION.md: measured speculation, from results/speculation.json, with targets."""

from benchmarks.decode import on_gpu
from tokendepth.report.tables import piped
from tokendepth.runs.results import Row

SPEEDUP_TARGET = 1.4
"""Over plain decoding."""
FORMULA_TARGET = 0.9
"""Measured speedup, relative to the formula with costs as they were timed."""
TITLES = ["device", "model", "dtype", "texts x tokens", "plain, tokens/s", "speculating, tokens/s", "speedup",
          "draft costs from", "acceptance", "tokens per draft", "formula, timed costs",
          f"measured / formula, target {FORMULA_TARGET:g}", f"speedup, target {SPEEDUP_TARGET:g}x",
          "tokens that differ / unexplained"]  # fmt: skip


def table(rows: list[Row]) -> str:
    """A line for each row, GPUs first; `not run` if there is none."""
    lines = [TITLES, ["---", "---", "---", *("--:" for _ in TITLES[3:])]]
    if not rows:
        return piped([*lines, ["not run", *("" for _ in TITLES[1:])]])
    lines += [_line(row) for row in sorted(rows, key=_place)]
    versions, commits = (", ".join(dict.fromkeys(row[name] for row in rows)) for name in ("torch", "commit"))
    return piped(lines) + f"\ntorch {versions}, commit {commits}.\n"


def _place(row: Row) -> tuple:
    budget, share = (-1.0 if row[name] is None else row[name] for name in ("budget", "share"))
    return not on_gpu(row), row["device"], row["run"], row["dtype"], row["temperature"], budget, share


def _line(row: Row) -> list[str]:
    plain, drafting = (f"{row[name][0]:.1f}" for name in ("plain_tokens_per_s", "speculation_tokens_per_s"))
    speedup = "{:.2f}x ({:.2f} to {:.2f})".format(*row["speedup"])
    written = f"{row['prompts']} x {row['tokens'] // row['prompts']}"
    costs = "timing" if row.get("pace") else "weights"  # older rows: before costs were timed
    cells = [row["device"], _model(row), row["dtype"], written, plain, drafting, speedup, costs]
    if row["drafted"]:
        share = row["speedup"][0] / row["formula_by_time"]
        cells += [f"{row['acceptance']:.3f}", f"{row['draft_length']:.1f}", f"{row['formula_by_time']:.2f}x"]
        cells.append(f"{share:.2f}: {_verdict(share, FORMULA_TARGET)}")
    else:
        cells += ["nothing was drafted", *["\u2014"] * 3]
    differing = f"{row['tokens_that_differ']} of {row['tokens']} / {row['unexplained']}"
    cells.append(_verdict(row["speedup"][0], SPEEDUP_TARGET))
    return [*cells, "\u2014" if row["temperature"] else differing]  # drawn tokens are compared with nothing


def _model(row: Row) -> str:
    """The run, with the options that are not its own."""
    parts = {"budget": "budget {:g}", "share": "drafts at {:g}"}
    asked = [words.format(row[name]) for name, words in parts.items() if row[name] is not None]
    return ", ".join([row["run"], *asked, *([f"temperature {row['temperature']:g}"] if row["temperature"] else [])])


def _verdict(value: float, target: float) -> str:
    return "met" if value >= target else "**missed**"
