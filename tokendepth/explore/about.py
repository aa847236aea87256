"""A run's curves and tables for the page, read from its folder each time: it may be trained or evaluated meanwhile."""

from typing import Any

from tokendepth.report.headline import headline
from tokendepth.report.records import Record
from tokendepth.report.summary import DASH, Row, columns, group, notes
from tokendepth.runs.run import Run

CURVES = {
    "loss": (("training", "task_loss"), ("validation", "val_loss")),
    "active fraction": (("training", "active_fraction"), ("validation", "val_active_fraction")),
}
"""By the title of a figure its lines, each with its name in metrics.jsonl."""


def about(run: Run) -> dict[str, Any]:
    """A JSON-ready tree: one sentence, the table's cells, its notes, and the points of every figure."""
    record = Record.read(Run.open(run.path))
    (row,) = group([record])
    figures = [_over_steps(record, title) for title in CURVES]
    return {
        "sentence": headline([row]).text,
        "cells": _cells(row) if record.evaluation else [],
        "notes": notes([row]),
        "figures": [figure for figure in [*figures, _over_cost(record)] if figure["lines"]],
    }


def _cells(row: Row) -> list[dict[str, str]]:
    found = [{"group": each.group, "title": each.short, "value": row.cell(each)} for each in columns([row])]
    return [cell for cell in found if cell["value"] != DASH]


def _over_steps(record: Record, title: str) -> dict[str, Any]:
    lines = [{"name": name, "points": record.curve("step", key)} for name, key in CURVES[title]]
    return {"title": title, "x": "step", "lines": [line for line in lines if line["points"]]}


def _over_cost(record: Record) -> dict[str, Any]:
    """Of a model that was executed at several budgets or thresholds: what it costs and how well it does at each."""
    points = [(each["flops_per_token"] / 1e6, each["sparse"]["loss"]) for each in record.field("curve") or []]
    lines = [{"name": "executed", "points": sorted(points)}] if len(points) > 1 else []
    return {"title": "loss by cost", "x": "million FLOPs per token, executed", "lines": lines}
