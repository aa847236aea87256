"""Runs in, tables, figures and one HTML page out. Imports no torch; draws only what run folders hold."""

from tokendepth.report.folder import build
from tokendepth.report.headline import sentences
from tokendepth.report.results import collect
from tokendepth.report.summary import rows
from tokendepth.report.tables import markdown_table, terminal_table

__all__ = ["build", "collect", "markdown_table", "rows", "sentences", "terminal_table"]
