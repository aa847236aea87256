"""From runs to tables, figures and one HTML page. Imports no torch; draws only what run folders hold."""

from tokendepth.report.folder import build, check_extra
from tokendepth.report.headline import sentences
from tokendepth.report.results import collect
from tokendepth.report.summary import rows
from tokendepth.report.tables import markdown_table, terminal_table

__all__ = ["build", "check_extra", "collect", "markdown_table", "rows", "sentences", "terminal_table"]
