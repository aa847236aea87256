"""Rows as a Markdown table, as JSON and as a terminal table."""

import html
import re
from typing import TYPE_CHECKING, Any

from tokendepth.report.summary import COLUMNS, Row, by_key, columns, notes, rows
from tokendepth.runs.run import Run

if TYPE_CHECKING:
    from rich.table import Table


def piped(lines: list[list[str]]) -> str:
    """Cells as a Markdown table: titles, alignment of the columns, rows."""
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plain(text: str) -> str:
    """`text` escaped for Markdown: a run's name may contain characters that a table or HTML would interpret."""
    return re.sub(r"([\\|`*$\[\]]|\b_|_\b)", r"\\\1", html.escape(text, quote=False))


IN_ROWS_ALONE = {"parameters", "flops_per_token", "speedup", "bits_per_character", "bits_per_byte"}
"""Columns that a brief table leaves out."""


def markdown_table(table: list[Row], *, brief: bool = False) -> str:
    """The table and its notes; ends with a line break. `brief` leaves out secondary and empty columns."""
    shown = columns(table)
    if brief:
        shown = [c for c in shown if c.key not in IN_ROWS_ALONE and any(row.stat(c) for row in table)]
    lines = [["run", "method", *(column.title for column in shown)], ["---", "---", *("--:" for _ in shown)]]
    for row in table:
        name = plain(row.title) + (" †" if row.collapses else "")
        lines.append([name, row.method, *(plain(row.cell(column)) for column in shown)])
    text = piped(lines)
    return text + "".join(f"\n{plain(note)}\n" for note in notes(table))


def json_table(table: list[Row]) -> dict[str, Any]:
    """Every column, unrounded, with one value per seed."""
    return {"version": 1, "rows": [_json_row(row) for row in table], "notes": notes(table)}


def _json_row(row: Row) -> dict[str, Any]:
    stats = {column.key: row.stat(column) for column in COLUMNS}
    return {
        "label": row.label,
        "method": row.method,
        "corpus": row.corpus,
        "runs": [record.name for record in row.records],
        "seeds": [record.config.train.seed for record in row.records],
        "finished": all(record.finished for record in row.records),
        "collapses_when_executed": row.collapses,
        "timed_on": row.timed if stats["speedup"] else None,
        "values": {
            key: {"mean": stat.mean, "std": stat.std, "per_seed": list(stat.values)} if stat else None
            for key, stat in stats.items()
        },
    }


HEADINGS = {
    "loss_soft": "soft\nloss",
    "active_fraction_soft": "soft\nactive",
    "tlops_saved_soft": "soft\nTLOps\nsaved",
    "loss_hard": "hard\nloss",
    "active_fraction_hard": "hard\nactive",
    "tlops_skipped": "work\nskipped",
    "flops_skipped": "FLOPs\nskipped",
    "speedup": "speed\nvs\ndense",
    "accuracy": "accu-\nracy",
}
"""Columns that fit into 80 characters; parameters go below the run's name."""
LEGEND = (
    "soft: gates as weights, nothing is skipped; the rest: real skipping. work: token-layer operations, with block 0."
)


def terminal_table(runs: list[Run]) -> "Table":
    """The results as a table for a terminal, with the notes as its caption."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = rows(runs)
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, caption_justify="left")
    timed = {row.timed for row in table if row.stat(by_key("speedup"))}
    drawn.caption = Text("\n".join([LEGEND, *(f"speed: a forward pass on {t}." for t in sorted(timed)), *notes(table)]))
    drawn.add_column("run", overflow="fold")
    shown = [column for column in columns(table) if column.key in HEADINGS]
    for column in shown:
        drawn.add_column(HEADINGS[column.key], justify="right", style="dim" if column.group == "soft" else "")
    for row in table:
        name = Text(row.title + (" †" if row.collapses else ""), style="bold red" if row.collapses else "bold")
        name.append(f"\n{row.method}" + _size(row), style="not bold dim")
        cells = [[part for part in row.numbers(column) if part != f"({row.timed})"] for column in shown]
        drawn.add_row(name, *(Text("\n".join(parts).replace("± ", "±")) for parts in cells))
    return drawn


def _size(row: Row) -> str:
    stat = row.stat(by_key("parameters"))
    return f", {stat.mean / 1e6:.2f}M" if stat else ""
