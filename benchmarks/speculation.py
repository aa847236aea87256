"""The table of docs/SPECULATION.md: speculation on the clock, from results/speculation.json, beside what we want."""

from benchmarks.decode import on_gpu
from tokendepth.report.tables import piped
from tokendepth.runs.results import Row

SPEEDUP_TARGET = 1.4
"""Over plain decoding."""
FORMULA_TARGET = 0.9
"""Of the speedup that the formula has for the passes as they were timed."""
TITLES = ["device", "model", "dtype", "texts x tokens", "plain, tokens/s", "speculating, tokens/s", "speedup",
          "costs of drafts by", "acceptance", "tokens a draft", "formula by time",
          f"of the formula, wanted {FORMULA_TARGET:g}", f"speedup, wanted {SPEEDUP_TARGET:g}x",
          "tokens that differ / unexplained"]  # fmt: skip


def table(rows: list[Row]) -> str:
    """A line for each row, GPUs first; one that says so where nothing was run."""
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
    costs = "the clock" if row.get("pace") else "weights"  # which drafting went by before it was timed
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
    """The run, and how it was asked to write where that is not its own way."""
    parts = {"budget": "budget {:g}", "share": "drafts at {:g}"}
    asked = [words.format(row[name]) for name, words in parts.items() if row[name] is not None]
    return ", ".join([row["run"], *asked, *([f"temperature {row['temperature']:g}"] if row["temperature"] else [])])


def _verdict(value: float, wanted: float) -> str:
    return "reached" if value >= wanted else "**missed**"
