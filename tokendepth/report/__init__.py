"""Turns runs into tables, figures and an HTML page, from their folders only. Does not import torch."""

from tokendepth.report.folder import build, check_extra
from tokendepth.report.headline import sentences
from tokendepth.report.results import collect
from tokendepth.report.summary import rows
from tokendepth.report.tables import markdown_table, terminal_table

__all__ = ["build", "check_extra", "collect", "markdown_table", "rows", "sentences", "terminal_table"]
