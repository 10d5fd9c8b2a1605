"""What a report knows of a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskInfo:
    """A task by name.

    Attributes
    ----------
    name : str
        As on the command line.
    title : str
        For headings.
    discriminates : bool
        Whether its score needs the linear layers' states. Retrieval at a clean boundary does not: it passes with zero
        states, and so says nothing about a replay ratio.
    """

    name: str
    title: str
    discriminates: bool
