"""The tables of docs/SERVE.md: throughput and latency of the server, from results/serve.json, with targets."""

from itertools import groupby

from tokendepth.report.tables import piped
from tokendepth.runs.results import Row

AT_ONCE_TARGET = 3.0
"""Throughput relative to the same server with one slot."""
BUSY = 0.2
"""CPU cores used by other processes; from here on a row is marked."""
NOTES = {
    ("smollm2-span-0.7", "bbffc133d75c"): (
        "These rows were measured earlier than the others, on a slower machine and with a slower version of the"
        "\nserver. Compare them only with each other.\n\n"
    ),
}
"""Printed above the table of a run's rows from a commit."""


def table(rows: list[Row]) -> str:
    """The comparisons first; then a part for each model on each device, our own server first."""
    parts = [_verdicts(rows)]
    for (run, device), found in groupby(sorted(rows, key=_place), key=lambda row: (row["run"], row["device"])):
        parts.append(f"**{run}** on {device}:\n\n{_of_run(list(found))}")
    return "\n".join(parts)


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
    titles = ["server", "mode", "slots", "clients", "tokens/s", "first token, ms", "ms per token", "request, median ms",
              "99th percentile, ms", "FLOPs skipped", "others' cores"]  # fmt: skip
    lines = [titles, ["---", "---", *("--:" for _ in titles[2:])]]
    lines += [_line(row) for row in rows]
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    note = "".join(NOTES.get((rows[0]["run"], commit), "") for commit in commits)
    about = f"{rows[0]['tokens']} tokens per request after a prompt of {rows[0]['prompt_words']} words, greedy, "
    about += f"float32; torch {rows[0]['torch']}, commit {', '.join(commits)}"
    return note + piped(lines) + f"\n{about}.\n"


def _line(row: Row) -> list[str]:
    words = {"sparse": "skipping", "dense": "dense model", "hard": "the same weights, dense"}
    busy, skipped = row.get("others_cores"), row.get("flops_skipped")
    return [
        row["server"], words[row["execution"]], str(row["slots"] or "default"), str(row["clients"]),
        f"{row['tokens_per_s']:.1f}", *(f"{row[name][0]:.0f}" for name in ("first_token_ms", "token_ms", "request_ms")),
        f"{row['request_ms'][-1]:.0f}", "\u2014" if skipped is None else f"{round(100 * skipped)}%",
        "\u2014" if busy is None else f"{busy:.1f}" if busy < BUSY else f"**{busy:.1f}**",
    ]  # fmt: skip


def _verdicts(rows: list[Row]) -> str:
    """Continuous batching against one at a time, skipping against the same server run densely, and another server."""
    lines = [["model", "clients", "comparison", "throughput", "target"], ["---", "--:", "---", "--:", "---"]]
    modes = {"sparse": "skipping, ", "hard": "dense, ", "dense": ""}
    for row in sorted(rows, key=_place):
        if row["server"] != "tokendepth":
            continue
        alone = _other(rows, row, slots=1)
        if row["slots"] > 1 and alone:
            ratio = row["tokens_per_s"] / alone["tokens_per_s"]
            verdict = f"{AT_ONCE_TARGET:g}x: {'met' if ratio >= AT_ONCE_TARGET else '**missed**'}"
            verdict += ", on a busy machine" if max(row["others_cores"], alone["others_cores"]) >= BUSY else ""
            words = f"{modes[row['execution']]}{row['slots']} slots vs. 1"
            lines.append([row["run"], str(row["clients"]), words, f"{ratio:.2f}x", verdict])
        dense = _other(rows, row, execution="hard")
        if row["execution"] == "sparse" and row["slots"] > 1 and dense:
            ratio, differing = row["tokens_per_s"] / dense["tokens_per_s"], dense["differing_texts"]
            words = f"skipping vs. dense, same weights; {differing} of {dense['requests']} texts differ"
            lines.append([row["run"], str(row["clients"]), words, f"{ratio:.2f}x", ""])
        for other in (each for each in rows if _key(each) == _key(row) and each["server"] != row["server"]):
            if row["execution"] != "hard" and row["slots"] > 1:
                ratio, words = row["tokens_per_s"] / other["tokens_per_s"], f"tokendepth vs. {other['server']}"
                lines.append([row["run"], str(row["clients"]), words, f"{ratio:.2f}x", ""])
    return piped(lines)


def _key(row: Row) -> tuple:
    return row["run"], row["device"], row["clients"]


def _other(rows: list[Row], row: Row, **change: object) -> Row | None:
    """The row that differs only in `change`."""
    names = ("server", "run", "device", "clients", "execution", "slots")
    sought = {**{name: row[name] for name in names}, **change}
    return next((each for each in rows if all(each[name] == value for name, value in sought.items())), None)
