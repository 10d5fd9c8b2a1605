"""Where a page's numbers come from; decides what exact mode may touch."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Start(IntEnum):
    """What the replay of a hit began with. Of two copies of a page that differ in nothing else, the smaller one stays.

    ``COMPLETE``: nothing is neglected (the whole prefix, or all since a saved state). ``MIXED``: halfway between an earlier
    saved state, stale as it was, and the model's mean state. ``CARRIED``: the former alone. ``MEAN``: the latter alone.
    ``ZERO``: zero states, as in the Tail-Replay paper (arXiv 2608.30310). docs/method.md has how close each comes, by the
    anchor's distance.
    """

    COMPLETE = 0
    MIXED = 1
    CARRIED = 2
    MEAN = 3
    ZERO = 4

    def __str__(self) -> str:
        return self.name.lower()


class Provenance(NamedTuple):
    """Origin of a page. Smaller is better: ``EXACT`` sorts before all others.

    Attributes
    ----------
    depth : int
        How many approximate replays lie behind the numbers; 0 if none.
    lossy : bool
        True if they went through a lossy codec.
    start : Start
        The worst that any of those replays began with.
    """

    depth: int = 0
    lossy: bool = False
    start: Start = Start.COMPLETE

    @property
    def is_exact(self) -> bool:
        """Whether exact mode may use the page."""
        return self == EXACT

    def worst(self, other: Provenance) -> Provenance:
        """Return the origin of numbers of which some come from `other`: never better than either in any respect."""
        return Provenance(max(self.depth, other.depth), self.lossy or other.lossy, max(self.start, other.start))

    def after(self, start: Start) -> Provenance:
        """Return the origin of what is computed from these numbers after a replay that began with `start`."""
        return Provenance(self.depth + (start is not Start.COMPLETE), self.lossy, max(self.start, start))

    def __str__(self) -> str:
        if self.depth:
            return f"approximate (depth {self.depth})"
        return "quantised" if self.lossy else "exact"


EXACT = Provenance()


class Terms(NamedTuple):
    """Which pages a request takes.

    Attributes
    ----------
    depth : int or None
        Most approximate replays behind a page; None for any number.
    lossy : bool
        Whether pages that went through a lossy codec will do.
    """

    depth: int | None = None
    lossy: bool = True

    def take(self, provenance: Provenance) -> bool:
        """Whether numbers of this origin will do."""
        return (self.depth is None or provenance.depth <= self.depth) and (self.lossy or not provenance.lossy)


ANY, ONLY_EXACT = Terms(), Terms(0, lossy=False)
