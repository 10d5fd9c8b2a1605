"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailreplay.evals.report.grids import Grid, setting_lines
from tailreplay.evals.report.sections import sections_of
from tailreplay.evals.summary import Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLOURS = {True: "green", False: "red", None: "yellow"}


def print_tables(console: Console, summary: Summary, settings: Mapping[str, Any]) -> None:
    """Print all tables and the verdicts on the tasks.

    Parameters
    ----------
    console : rich.console.Console
    summary : Summary
    settings : mapping
        Whatever describes the run, printed first.
    """
    from rich.text import Text

    # Texts, because rich reads square brackets in a plain string as markup.
    lines = [f"{name}: {text}" for name, text in [*setting_lines(settings), ("documents", str(summary.documents))]]
    console.print(Text(" · ".join(lines), style="dim"))
    sections = sections_of(summary)
    if not sections:
        console.print("Nothing measured yet.")
    for place, section in enumerate(sections):
        console.print()
        console.rule(Text(section.title, style="bold"), align="left")
        for grid in section.grids:
            console.print(table_of(grid))
        console.print(Text(section.text, style="dim"))
        if place == 0:
            _print_verdicts(console, summary)


def _print_verdicts(console: Console, summary: Summary) -> None:
    from rich.text import Text

    console.print()
    for verdict in summary.verdicts:
        console.print(Text.assemble((verdict.word, _COLOURS[verdict.passed]), f"  {verdict.text}"))


def table_of(grid: Grid) -> Table:
    """Return a grid as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(grid.title), title_justify="left")
    for place, heading in enumerate(grid.headings):
        table.add_column(Text(heading), justify="right" if place else "left")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table
