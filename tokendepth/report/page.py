"""report.html: one self-contained file, rendered from the template next to this module.

Everything that comes from a run is escaped by the template; only our own SVG is passed as markup.
"""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tokendepth.config import method_name
from tokendepth.report.figures import Drawing, looks
from tokendepth.report.glossary import GLOSSARY
from tokendepth.report.headline import Headline
from tokendepth.report.palette import ACTIVE, INK, LOOKS, PAPER, SKIPPED, UNKNOWN, RowLook
from tokendepth.report.records import LINE_ENDS, Passage, Record, printable, visible
from tokendepth.report.summary import DASH, Column, Row, columns, notes

ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,  # a misspelt name in the template fails a test instead of showing nothing
    trim_blocks=True,
    lstrip_blocks=True,
)


SHORT = 1000
"""Steps; losses after fewer say little about those after many."""
METHODS = [(f"--method-{name.replace('_', '-')}", look) for name, look in {**LOOKS, "unknown": UNKNOWN}.items()]
"""CSS variables for the methods' colours, which differ between light and dark pages."""
COLOURS = {"methods": METHODS, "active": " ".join(map(str, bytes.fromhex(ACTIVE[1:]))), "skipped": SKIPPED}
"""Variables of style.html, for every page."""


def render(
    table: list[Row],
    headlines: list[tuple[Headline, Drawing | None]],
    drawings: list[Drawing],
    maps: dict[Path, Drawing],
    title: str,
) -> str:
    records = [record for row in table for record in row.records]
    shown = columns(table)
    return ENVIRONMENT.get_template("page.html").render(
        title=title,
        columns=shown,
        groups=[(name, sum(c.group == name for c in shown)) for name in ("", "soft", "executed")],
        rows=[_row(row, look, shown) for look, row in zip(looks(table), table, strict=True)],
        headlines=[(words, picture and inlined(picture)) for words, picture in headlines],
        paints={row.label: _paint(look.colour) for look, row in zip(looks(table), table, strict=True)},
        glossary=GLOSSARY,
        notes=notes(table),
        short=steps if records and (steps := max(r.config.train.steps for r in records)) < SHORT else 0,
        figures=[inlined(drawing) for drawing in drawings],
        passages=[_passage(record, passage, maps) for record in records if (passage := record.passage)],
        records=[_provenance(record) for record in records],
        shades=[i / 8 for i in range(9)],
        dash=DASH,
        **COLOURS,
    )


def _paint(colour: str) -> str:
    """The CSS variable of a method's colour, so that it adapts to light and dark pages."""
    return next((f"var({name})" for name, look in METHODS if look.colour == colour), colour)


def _row(row: Row, look: RowLook, shown: list[Column]) -> dict[str, Any]:
    seeds = ", ".join(str(record.config.train.seed) for record in row.records)
    return {
        "label": row.title,
        "about": f"{row.corpus}, seed{'s' if len(row.records) > 1 else ''} {seeds}",
        "method": row.method,
        "colour": _paint(look.colour),
        "collapses": row.collapses,
        "cells": [(c, row.collapses and c.key == "loss_hard", row.numbers(c)) for c in shown],
    }


def inlined(drawing: Drawing) -> dict[str, Any]:
    return {"svg": Markup(inline(drawing.svg.decode(), drawing.name)), "caption": drawing.caption}


def inline(svg: str, prefix: str) -> str:
    """Prepare an SVG for inlining: no prolog, unused ids and background; the page's colours."""
    svg = re.sub(r"<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    opening, body = svg.split(">", 1)
    svg = re.sub(r' (width|height|version)="[^"]*"', "", opening) + ">" + body  # the page's style gives it a size
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for colour in {look.colour for _, look in METHODS} - {INK}:
        svg = svg.replace(colour, _paint(colour))
    return svg.replace(INK, "currentColor").replace(PAPER, "none").replace("<svg", '<svg role="img"', 1).strip()


def _passage(record: Record, passage: Passage, maps: dict[Path, Drawing]) -> dict[str, Any]:
    modes = passage.modes
    tokens = []
    for t, piece in enumerate(passage.pieces):
        depth = {mode: sum(row[t] for row in grid) / len(grid) for mode, grid in modes.items()}
        shades = ";".join(f"--{mode}:{share:.2g}" for mode, share in depth.items())
        ends = piece.endswith(LINE_ENDS)
        tokens.append({"text": visible(piece), "breaks": ends, "shades": shades, "tip": _tip(passage, t)})
    return {
        "name": record.name,
        "tokens": tokens,
        "words": any(len(piece) > 1 for piece in passage.pieces),  # longer tokens need gaps between them
        "modes": list(modes),
        "figure": inlined(maps[record.path]),
    }


def _tip(passage: Passage, t: int) -> str:
    """The tooltip of one token, with one line per router."""
    surprisal = passage.surprisal[t]
    lines = [
        f"{visible(passage.pieces[t])}  surprisal (soft) " + (DASH if surprisal is None else f"{surprisal:.2f} nats")
    ]
    for s, site in enumerate(passage.sites):
        keep = [] if passage.soft is None else [f"gate {passage.soft[s][t]:.2f}"]
        decision = [] if passage.hard is None else ["active" if passage.hard[s][t] else "skipped"]
        lines.append(f"{site}: " + ", ".join(keep + decision))
    return "\n".join(lines)


def _provenance(record: Record) -> dict[str, Any]:
    """Where a run's numbers come from: model, training, environment, and further results of its evaluation."""
    config = record.config
    model, train = config.model, config.train
    facts = {
        "folder": str(record.path),
        "state": "finished" if record.finished else f"not finished: step {record.step:,} of {train.steps:,}",
        "recipe": config.recipe or DASH,
        "method": " ".join([method_name(config.method), *(f"{k}={v}" for k, v in vars(config.method).items())]),
        "data": f"{record.corpus}, tokens: {config.data.tokens}",
        "model": f"{model.n_layer} layers, width {model.d_model}, {model.n_head} heads, context {model.context}",
        "layers": f"{model.norm} norm, {model.positions} positions, {model.kv_heads} K/V heads, {model.ffn}",
        "training": f"{train.steps:,} steps, batch {train.batch_size}, lr {train.lr:g}, seed {train.seed}",
    }
    if record.imported:
        facts["training"] = f"none: imported from {record.env['imported_from']}"
    if config.retrofit is not None:
        facts["retrofit"] = " ".join(f"{name}={value}" for name, value in vars(config.retrofit).items())
    if tokens := record.number("tokens"):
        facts["evaluated on"] = f"{tokens:,.0f} tokens of the {record.field('split')} split"
    for name in ("untrained_router_soft", "untrained_router_hard", "random_decisions_hard"):
        if (loss := record.number("controls", name, "loss")) is not None:
            active = record.number("controls", name, "active_fraction")
            at = DASH if active is None else f"{active:.3f}"
            facts["control: " + name.replace("_", " ")] = f"loss {loss:.4f}, active fraction {at}"
    if (flips := record.number("decision_flips")) is not None:
        facts["decisions that differ between hard and sparse"] = f"{flips:,.0f}"
    for mode in ("dense", "hard", "sparse"):
        if len(spread := record.numbers("time", f"{mode}_ms")) == 3:
            facts[f"time, {mode}"] = "{:.2f} ms (median; {:.2f} to {:.2f})".format(*spread)
    facts |= {f"environment: {key}": value for key, value in sorted(record.env.items())}
    return {"name": record.name, "facts": {key: printable(str(value)) for key, value in facts.items()}}
