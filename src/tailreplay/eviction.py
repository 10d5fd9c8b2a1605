"""Which page, or whose hiddens, go next when room is needed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tailreplay.page import Page
from tailreplay.quotas import Shares

_FEW = 128  # entries that are not worth tidying up; each that is out of date may keep a page from being freed


class Policy(Protocol):
    """Ranks pages for eviction.

    Attributes
    ----------
    name : str
        As people write it.
    """

    name: str

    def sized(self, pages: int, page_size: int) -> None:
        """Take note of the number of pages that there is room for, of `page_size` tokens each, before any is ranked."""
        ...

    def rank(self, page: Page) -> float:
        """Return a number that changes only when the page is used: the lowest goes first."""
        ...


class Evictable(Protocol):
    """What may have to go."""

    @property
    def tenant(self) -> bytes: ...

    @property
    def order(self) -> int: ...


E = TypeVar("E", bound=Evictable)


class LeastRecentlyUsed:
    """The page that was matched longest ago goes first."""

    name = "lru"

    def sized(self, pages: int, page_size: int) -> None:
        pass

    def rank(self, page: Page) -> float:
        return page.last_used


class Victims(Generic[E]):
    """Pages that may go, lowest rank first; ties by age, so that the order is the same in every run.

    Heaps with lazy deletion: a page is pushed each time it becomes free to go, and entries that no longer say the truth are
    skipped when they come up. `push` and `pop` take O(log pages), times the number of tenants that have a share of their
    own.

    Parameters
    ----------
    rank : callable
        See `Policy.rank`.
    is_free : callable
        Whether a page may go just now.
    shares : Shares
        Who may push out whose.
    """

    def __init__(self, rank: Callable[[E], float], is_free: Callable[[E], bool], shares: Shares) -> None:
        self._rank = rank
        self._is_free = is_free
        self._shares = shares
        # All tenants without a share of their own are in one heap.
        self._named = shares.named
        self._heaps: dict[bytes | None, list[tuple[float, int, E]]] = {}
        self._floors: dict[bytes | None, int] = {}

    def push(self, page: E) -> None:
        """Note that `page` has become free to go."""
        name = page.tenant if page.tenant in self._named else None
        heap = self._heaps.setdefault(name, [])
        heapq.heappush(heap, (self._rank(page), page.order, page))
        if len(heap) > self._floors.get(name, _FEW):
            self._compact(name)

    def pop(self, tenant: bytes | None = None, own: bool = False) -> E | None:
        """Return the next page to go and forget it here; None if there is none.

        Parameters
        ----------
        tenant : bytes, optional
            For whose sake; None for nobody's: then any page goes.
        own : bool
            Take the tenant's own pages only.
        """
        best: bytes | None = None
        first: tuple[float, int, E] | None = None
        for name in self._heaps:
            if tenant is not None and not self._may_take(tenant, name, own):
                continue
            head = self._head(name)
            if head is not None and (first is None or head[:2] < first[:2]):
                best, first = name, head
        if first is None:
            return None
        heapq.heappop(self._heaps[best])
        return first[2]

    def _may_take(self, tenant: bytes, name: bytes | None, own: bool) -> bool:
        if own:
            return name == tenant
        return name is None or self._shares.may_take(tenant, name)

    def _head(self, name: bytes | None) -> tuple[float, int, E] | None:
        heap = self._heaps[name]
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _is_current(self, entry: tuple[float, int, E]) -> bool:
        return self._is_free(entry[2]) and self._rank(entry[2]) == entry[0]

    def _compact(self, name: bytes | None) -> None:
        # A page can be pushed again with the same rank; one entry is enough.
        current = {entry[:2]: entry for entry in self._heaps[name] if self._is_current(entry)}
        self._heaps[name] = list(current.values())
        heapq.heapify(self._heaps[name])
        self._floors[name] = max(_FEW, 2 * len(current))
