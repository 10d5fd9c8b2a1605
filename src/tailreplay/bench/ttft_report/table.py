"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailreplay.bench.ttft_report.grids import limit_grid, sections_of
from tailreplay.bench.ttft_report.html import settings_of
from tailreplay.evals.report.table import table_of

if TYPE_CHECKING:
    from rich.console import Console


def print_tables(console: Console, report: dict[str, Any]) -> None:
    """Print the tables of a report, settings first."""
    from rich.text import Text

    lines = " · ".join(f"{name}: {text}" for name, text in settings_of(report))
    console.print(Text(lines, style="dim"))
    for section in sections_of(report):
        console.print()
        for grid in section.grids:
            table = table_of(grid)
            table.padding = (0, 0, 0, 1)  # many columns
            console.print(table)
        console.print(Text(section.text, style="dim"))


def print_limits(console: Console, found: Sequence[dict[str, Any]]) -> None:
    """Print a table of limits for each model."""
    for model in found:
        console.print(table_of(limit_grid(model)))
    console.print("Operations only: a measured speed-up is usually below the limit.")
