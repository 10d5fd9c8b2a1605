"""Places for pages in a store of fixed size."""

from __future__ import annotations

import heapq


def divide(limit: int, kv_bytes: int, hidden_bytes: int, hidden_share: float) -> tuple[int, int]:
    """Return how many pages' keys and values fit into `limit` bytes beside the hiddens of a share of them, and how many.

    Parameters
    ----------
    kv_bytes, hidden_bytes : int
        Of one page.
    hidden_share : float
        In (0, 1]: for how many of the pages there is room for hiddens.
    """
    pages = int(limit // (kv_bytes + hidden_share * hidden_bytes))
    if not hidden_bytes:
        return pages, pages
    pages = min(pages, (limit - hidden_bytes) // kv_bytes)  # without any hiddens there would be no hits
    return pages, min(pages, (limit - pages * kv_bytes) // hidden_bytes)


class SlotPool:
    """Hands out the numbers ``0 .. count-1``, the lowest free one first: that keeps runs of pages contiguous."""

    def __init__(self, count: int) -> None:
        self.count = count
        # A heap of slots that were given back, then those never used: a pool of millions starts empty.
        self._freed: list[int] = []
        self._untouched = 0

    @property
    def used(self) -> int:
        """Slots in use."""
        return self._untouched - len(self._freed)

    def take(self) -> int | None:
        """Return a free slot, in use from now on; None if there is none."""
        if self._freed:
            return heapq.heappop(self._freed)
        if self._untouched == self.count:
            return None
        self._untouched += 1
        return self._untouched - 1

    def give_back(self, slot: int) -> None:
        """Free `slot`, which must be in use."""
        heapq.heappush(self._freed, slot)
