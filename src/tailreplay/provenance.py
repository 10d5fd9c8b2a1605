"""Where a page's numbers come from; decides what exact mode may touch."""

from __future__ import annotations

from typing import NamedTuple


class Provenance(NamedTuple):
    """Origin of a page. Smaller is better: ``EXACT`` sorts before all others.

    Attributes
    ----------
    depth : int
        How many approximate replays lie behind the numbers; 0 if none.
    lossy : bool
        True if they went through a lossy codec.
    """

    depth: int = 0
    lossy: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether exact mode may use the page."""
        return self == EXACT

    def worst(self, other: Provenance) -> Provenance:
        """Return the origin of numbers of which some come from `other`: never better than either in any respect."""
        return Provenance(max(self.depth, other.depth), self.lossy or other.lossy)

    def __str__(self) -> str:
        if self.depth:
            return f"approximate (depth {self.depth})"
        return "quantised" if self.lossy else "exact"


EXACT = Provenance()
