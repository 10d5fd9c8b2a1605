"""Reports of benchmarks as files: a picture, and one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailreplay.bench.files import require_for, writable, writing
from tailreplay.evals.report.grids import Grid, setting_lines
from tailreplay.evals.report.page import grid_html, page, picture_html, settings_html

Draw = Callable[[Any], None]
"""Draws on a matplotlib figure."""


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check_files` and `write_files` read."""
    parser.add_argument("--html", metavar="FILE", help="write the tables and the picture as one HTML file")
    parser.add_argument("--png", metavar="FILE", help="write the picture")


def check_files(arguments: argparse.Namespace, *names: str) -> None:
    """Raise an error of one sentence if the report could not be given as wanted: before anything is measured.

    Raises
    ------
    InvalidRequestError
        If a file that options name, these or others in `names`, cannot be written.
    TailReplayError
        If a package is missing that draws the picture or prints the table.
    """
    for name in ("html", "png", *names):
        if getattr(arguments, name) is not None:
            writable(Path(getattr(arguments, name)))
    require_for(pictures=arguments.html is not None or arguments.png is not None, tables=not arguments.json)


def write_files(arguments: argparse.Namespace, title: str, grids: Sequence[Grid], draw: Draw, pictured: str) -> None:
    """Write the files that the options name, if any.

    Parameters
    ----------
    pictured : str
        What the picture shows, in words.

    Raises
    ------
    TailReplayError
        If one cannot be written.
    """
    if arguments.html is None and arguments.png is None:
        return
    picture = _png(draw)
    if arguments.png is not None:
        with writing(arguments.png):
            Path(arguments.png).write_bytes(picture)
    if arguments.html is not None:
        parts = [
            picture_html(picture, pictured),
            *map(grid_html, grids),
            settings_html(setting_lines(options_of(arguments))),
        ]
        with writing(arguments.html):
            Path(arguments.html).write_text(page(title, parts), encoding="utf-8")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run, for its report."""
    return {name: value for name, value in vars(arguments).items() if name not in ("benchmark", "extra")}


def _png(draw: Draw) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    draw(figure)
    file = io.BytesIO()
    # Agg, whatever the machine's display: a figure made without pyplot starts no window.
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
