"""The console that commands print tables on."""

from __future__ import annotations

import sys

from rich.console import Console


def console() -> Console:
    """Return a console as wide as the terminal; output that goes to a file or a pipe gets room for whole tables."""
    return Console() if sys.stdout.isatty() else Console(width=120)
