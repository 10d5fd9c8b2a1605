"""Reports of an evaluation: tables for a terminal, a picture, one HTML file, JSON."""

from tailreplay.evals.report.html import write_html
from tailreplay.evals.report.json import to_json
from tailreplay.evals.report.picture import draw
from tailreplay.evals.report.table import print_tables

__all__ = ["draw", "print_tables", "to_json", "write_html"]
