"""Reports of times to first token: tables for a terminal, plots, one HTML file."""

from tailreplay.bench.ttft_report.html import write_html
from tailreplay.bench.ttft_report.picture import picture
from tailreplay.bench.ttft_report.table import print_limits, print_tables

__all__ = ["picture", "print_limits", "print_tables", "write_html"]
