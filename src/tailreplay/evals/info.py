"""What a report has to know of a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskInfo:
    """A task as reports name and place it.

    Attributes
    ----------
    name : str
        Name in records.
    title : str
        Name for people.
    discriminates : bool
        Whether scores fall without the linear states. A task that passes even with zero states says nothing about how
        much of the prefix to replay, so it is reported apart.
    retrieval : bool
        Whether the answer stands in the document, so that it must be lost without attention's keys and values.
    """

    name: str
    title: str
    discriminates: bool
    retrieval: bool = False
