"""A run's curves and tables for the page, read from its folder each time, since the run may be training."""

from typing import Any

from tokendepth.report.headline import headline
from tokendepth.report.records import Record
from tokendepth.report.summary import DASH, Row, columns, group, notes
from tokendepth.runs.run import Run

CURVES = {
    "loss": (("training", "task_loss"), ("validation", "val_loss")),
    "active fraction": (("training", "active_fraction"), ("validation", "val_active_fraction")),
}
"""Figure title -> its lines, as (label, key in metrics.jsonl)."""


def about(run: Run) -> dict[str, Any]:
    """JSON-ready: a sentence, the table's cells and notes, and the points of the figures."""
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
    """Loss against cost, for a model executed at several budgets or thresholds."""
    points = [(each["flops_per_token"] / 1e6, each["sparse"]["loss"]) for each in record.field("curve") or []]
    lines = [{"name": "executed", "points": sorted(points)}] if len(points) > 1 else []
    return {"title": "loss by cost", "x": "million executed FLOPs per token", "lines": lines}
