"""Which page goes next when room is needed."""

from __future__ import annotations

import heapq

from tailreplay.page import Page


class LeastRecentlyUsed:
    """Least recently used leaf first; ties by age, so the order is the same in every run.

    A heap with lazy deletion: a page is pushed each time it becomes evictable, and entries that no longer say the truth
    are skipped when they come up. `push` and `pop` take O(log pages).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Page]] = []
        self._floor = 1024

    def push(self, page: Page) -> None:
        """Note that `page` has become evictable."""
        heapq.heappush(self._heap, (page.last_used, page.order, page))
        if len(self._heap) > self._floor:
            self._compact()

    def pop(self) -> Page | None:
        """Return the next page to evict and forget it here; None if no page is evictable."""
        while self._heap:
            last_used, _, page = heapq.heappop(self._heap)
            if self._is_current(last_used, page):
                return page
        return None

    @staticmethod
    def _is_current(last_used: int, page: Page) -> bool:
        return page.is_evictable and page.last_used == last_used

    def _compact(self) -> None:
        # A page can be pushed again with the same tick; one entry is enough.
        current = {entry[:2]: entry[2] for entry in self._heap if self._is_current(entry[0], entry[2])}
        self._heap = [(*name, page) for name, page in current.items()]
        heapq.heapify(self._heap)
        self._floor = max(1024, 2 * len(self._heap))
