"""Reports of benchmarks as files: a picture, and one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailreplay.errors import InvalidRequestError
from tailreplay.evals.report.grids import Grid, setting_lines
from tailreplay.evals.report.page import grid_html, page, picture_html, settings_html

Draw = Callable[[Any], None]
"""Draws on a matplotlib figure."""


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check_files` and `write_files` read."""
    parser.add_argument("--html", metavar="FILE", help="write the tables and the picture as one HTML file")
    parser.add_argument("--png", metavar="FILE", help="write the picture")


def check_files(arguments: argparse.Namespace, *names: str) -> None:
    """Raise `InvalidRequestError` if a file that options name cannot be written: before anything is measured."""
    for name in ("html", "png", *names):
        path = getattr(arguments, name)
        if path is not None:
            try:
                Path(path).open("a").close()
            except OSError as error:
                raise InvalidRequestError(f"--{name}: '{path}' cannot be written: {error.strerror}.") from None


def write_files(arguments: argparse.Namespace, title: str, grids: Sequence[Grid], draw: Draw, pictured: str) -> None:
    """Write the files that the options name, if any.

    Parameters
    ----------
    pictured : str
        What the picture shows, in words.
    """
    if arguments.html is None and arguments.png is None:
        return
    picture = _png(draw)
    if arguments.png is not None:
        Path(arguments.png).write_bytes(picture)
    if arguments.html is not None:
        parts = [
            picture_html(picture, pictured),
            *map(grid_html, grids),
            settings_html(setting_lines(options_of(arguments))),
        ]
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
