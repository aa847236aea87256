"""build: write the report folder, once all of its content has been generated."""

import os
from pathlib import Path

from tokendepth.errors import UserError
from tokendepth.report.headline import by_corpus, headline
from tokendepth.report.summary import rows
from tokendepth.report.tables import json_table, markdown_table
from tokendepth.runs.files import disk_faults, write_bytes, write_json
from tokendepth.runs.run import Run


def check_extra() -> None:
    """Raise UserError if the drawing packages are missing; call this before any work that ends in a report."""
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "a package").split(".")[0]
        raise UserError(f"the report needs {missing}, not installed; pip install 'tokendepth[report]'") from None


def build(runs: list[Run], out: Path, title: str | None = None) -> Path:
    """Write report.html, table.md, table.json and figures/ into `out`; returns the path of report.html.

    An existing report and its figures are replaced; no other file is touched.
    """
    table = rows(runs)
    out = Path(out)
    if os.path.isfile(out):
        raise UserError(f"{out} is a file; expected a folder for the report; choose another --out")
    check_extra()
    from tokendepth.report import figures, heatmap, overview, page, pareto

    headlines = []
    for n, members in enumerate(by_corpus(table).values(), 1):
        headlines.append((headline(members), overview.overview(f"overview_{n:02d}", members)))
    drawings = [*figures.comparison(table), *pareto.pareto(table)]
    maps = {}
    for record in (record for row in table for record in row.records):
        if passage := record.passage:
            maps[record.path] = heatmap.token_map(passage, f"tokens_{len(maps) + 1:02d}", record.name)
    html = page.render(table, headlines, drawings, maps, title or "tokendepth report")

    folder = out / "figures"
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    drawings += [*(picture for _, picture in headlines if picture), *maps.values()]
    for drawing in drawings:
        write_bytes(folder / f"{drawing.name}.svg", drawing.svg)
        write_bytes(folder / f"{drawing.name}.png", drawing.png)
    with disk_faults(folder):
        for stale in _stale(folder, {drawing.name for drawing in drawings}):
            stale.unlink()
    write_bytes(out / "table.md", markdown_table(table).encode())
    write_json(out / "table.json", json_table(table))
    write_bytes(out / "report.html", html.encode(errors="replace"))
    return out / "report.html"


def _stale(folder: Path, kept: set[str]) -> list[Path]:
    """Figures of an earlier report that are not in this one and would seem to belong to it."""
    numbered = ("overview_[0-9][0-9]", "pareto_[0-9][0-9]", "tokens_[0-9][0-9]")
    patterns = ("loss_steps", "loss_tlops", "active_fraction", *numbered)
    ours = [path for name in patterns for suffix in ("svg", "png") for path in folder.glob(f"{name}.{suffix}")]
    return [path for path in ours if path.stem not in kept]
