"""The table of docs/SERVE.md: the server under load, from results/serve.json, beside what we want of it."""

from itertools import groupby

from tokendepth.report.tables import piped
from tokendepth.runs.results import Row

AT_ONCE_TARGET = 3.0
"""Of the throughput of one at a time, at the most clients."""
BUSY = 0.2
"""Cores that others kept busy meanwhile; from here on a row says so."""


def table(rows: list[Row]) -> str:
    """A part for each model on each device, its own server first; then what is wanted of each."""
    parts = []
    for (run, device), found in groupby(sorted(rows, key=_place), key=lambda row: (row["run"], row["device"])):
        parts.append(f"**{run}** on {device}:\n\n{_of_run(list(found))}")
    return "\n".join([*parts, _verdicts(rows)])


def _place(row: Row) -> tuple:
    order = {"sparse": 0, "dense": 1, "hard": 2}
    others = row["server"] != "tokendepth"
    return (
        row["device"],
        row["run"],
        others,
        row["server"],
        order[row["execution"]],
        -(row["slots"] or 0),
        row["clients"],
    )


def _of_run(rows: list[Row]) -> str:
    titles = ["server", "executed", "at a time", "clients", "tokens/s", "first token, ms", "a token, ms", "request, ms",
              "99th percentile", "FLOPs skipped", "others' cores"]  # fmt: skip
    lines = [titles, ["---", "---", *("--:" for _ in titles[2:])]]
    lines += [_line(row) for row in rows]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    about = f"{rows[0]['tokens']} tokens a request after {rows[0]['prompt_words']} words, greedy, float32; "
    return piped(lines) + f"\n{about}torch {rows[0]['torch']}, commit {commits}.\n"


def _line(row: Row) -> list[str]:
    words = {"sparse": "skipping", "dense": "nothing to skip", "hard": "the same weights, dense"}
    busy, skipped = row.get("others_cores"), row.get("flops_skipped")
    return [
        row["server"], words[row["execution"]], str(row["slots"] or "its own choice"), str(row["clients"]),
        f"{row['tokens_per_s']:.1f}", *(f"{row[name][0]:.0f}" for name in ("first_token_ms", "token_ms", "request_ms")),
        f"{row['request_ms'][-1]:.0f}", "\u2014" if skipped is None else f"{100 * skipped:.0f}%",
        "not known" if busy is None else f"{busy:.1f}" if busy < BUSY else f"**{busy:.1f}**",
    ]  # fmt: skip


def _verdicts(rows: list[Row]) -> str:
    """Continuous batching against one at a time, skipping against the same server run densely, and another server."""
    lines = [["model", "clients", "compared", "throughput", "wanted"], ["---", "--:", "---", "--:", "---"]]
    for row in sorted(rows, key=_place):
        if row["server"] != "tokendepth":
            continue
        alone = _beside(rows, row, slots=1)
        if row["slots"] > 1 and alone:
            ratio = row["tokens_per_s"] / alone["tokens_per_s"]
            wanted = f"{AT_ONCE_TARGET:g}x: {'reached' if ratio >= AT_ONCE_TARGET else '**missed**'}"
            wanted += ", on a busy machine" if max(row["others_cores"], alone["others_cores"]) >= BUSY else ""
            words = "skipping, " if row["execution"] == "sparse" else ""
            lines.append([row["run"], str(row["clients"]), f"{words}many at a time / one", f"{ratio:.2f}x", wanted])
        dense = _beside(rows, row, execution="hard")
        if row["execution"] == "sparse" and row["slots"] > 1 and dense:
            ratio, differing = row["tokens_per_s"] / dense["tokens_per_s"], dense["differing_texts"]
            words = f"skipping / dense; {differing} of {dense['requests']} texts differ"
            lines.append([row["run"], str(row["clients"]), words, f"{ratio:.2f}x", ""])
        for other in (each for each in rows if _key(each) == _key(row) and each["server"] != row["server"]):
            if row["execution"] != "hard" and row["slots"] > 1:
                ratio = row["tokens_per_s"] / other["tokens_per_s"]
                lines.append([row["run"], str(row["clients"]), f"ours / {other['server']}", f"{ratio:.2f}x", ""])
    return piped(lines)


def _key(row: Row) -> tuple:
    return row["run"], row["device"], row["clients"]


def _beside(rows: list[Row], row: Row, **change: object) -> Row | None:
    """The row that differs in `change` alone."""
    names = ("server", "run", "device", "clients", "execution", "slots")
    wanted = {**{name: row[name] for name in names}, **change}
    return next((each for each in rows if all(each[name] == value for name, value in wanted.items())), None)
