"""What graphs need of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Work = Callable[[], object]


class Graph(Protocol):
    """Recorded work on fixed memory."""

    def replay(self) -> None:
        """Queue the work again, on what its input memory holds by then. Its outputs are overwritten."""


class GraphDevice(Protocol):
    """Records graphs. Tests have one for CPU."""

    def queue(self) -> int:
        """Name the queue that this thread's work goes to now."""

    def warm_up(self, work: Work) -> None:
        """Do `work` as it is, away from other work, until everything that is made at first use is made."""

    def record(self, work: Work) -> Graph:
        """Record `work` without doing it. What it allocates lives as long as the graph.

        Raises
        ------
        RuntimeError
            If it cannot be recorded, since it needs the host, say.
        """

    def synchronize(self) -> None:
        """Wait for all work queued by this thread."""
