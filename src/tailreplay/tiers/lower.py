"""The tiers below one process's host memory: pages go down as they are stored and come up when a prompt needs them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from tailreplay.catalog import Catalog
from tailreplay.decisions import Match
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse
from tailreplay.page import Page
from tailreplay.tiers.base import Tier, TierError, Usage
from tailreplay.tiers.finder import Finder
from tailreplay.tiers.guard import Guarded
from tailreplay.tiers.mover import Mover
from tailreplay.tiers.naming import record_of
from tailreplay.tiers.orders import Spill
from tailreplay.tiers.packing import Packer
from tailreplay.tiers.promotion import Promotion, Search
from tailreplay.topology import Topology

_PATIENCE = 2.0
_SLOWEST = 50e6
# Pages that wait to be written are pinned: so many of all may be.
_SPILL_SHARE = 4
_CLOSE_SECONDS = 10.0


class LowerTiers:
    """Moves pages between a catalog's arena and tiers. Thread-safe.

    Parameters
    ----------
    lock : threading.Lock
        Guards `catalog`; never held while a tier is asked.
    tiers : sequence of Tier
        Fastest first, each within a deadline (see `tailreplay.tiers.guard`).
    """

    def __init__(self, catalog: Catalog, lock: threading.Lock, packer: Packer, tiers: Sequence[Tier]) -> None:
        self._catalog = catalog
        self._lock = lock
        self.tiers = tiers
        self._finder = Finder(tiers, catalog.page_size)
        self._mover = Mover(packer, tiers)
        self._lossy = packer.arena_is_lossy
        # One prompt at a time: what a prefetch is just bringing up, the request itself waits for.
        self._turn = threading.Lock()
        self._spilling: dict[int, Page] = {}
        self._waiting: deque[tuple[Page, Namespace]] = deque()
        self._all_written = threading.Condition(lock)
        self._tag = 0
        self._lost = 0
        self._closed = False

    def promote(
        self, ids: bytes, namespace: Namespace, reuse: Reuse, topology: Topology, limit: int
    ) -> tuple[int, bool]:
        """Bring up what the tiers hold of a prompt beyond host memory, or hiddens that it lacks there.

        Blocks until they are there, a tier's deadline has passed, or it takes longer than their bytes justify; what comes
        later still can be matched later. Returns how many pages came, and whether all came that were found.
        """
        with self._turn:
            match = self._match(ids, namespace, reuse, limit)
            search = Search(match, namespace, self._catalog.page_size, reuse, topology)
            found = self._finder.find(ids, namespace, search.start, search.parent)
            lacking = (
                [page for page in self._finder.pages(search.lacking) if page is not None] if search.lacking else []
            )
            if not found and not lacking:
                return 0, True
            arrived = threading.Event()
            with self._lock:
                promotion = Promotion(
                    self._catalog, namespace, ids, limit, reuse, topology, lacking, found, self._tag, self._lossy
                )
                self._tag += len(promotion.orders)
            if not promotion.orders:
                with self._lock:
                    return promotion.finish(), True
            came: list[int] = []

            def done(tag: int, good: bool) -> None:
                with self._lock:
                    if promotion.end(tag, good):
                        came.append(promotion.finish())
                        arrived.set()

            self._mover.fetch(promotion.orders, done)
            nbytes = sum(size for order in promotion.orders for *_, size in order.slots)
            arrived.wait(_PATIENCE + nbytes / _SLOWEST)
            return (came[0], came[0] == len(promotion.orders)) if came else (0, False)

    def spill(self, page: Page, namespace: Namespace) -> None:
        """Write a committed page to the tiers, some time later, if it is still there then. Under the lock."""
        self._waiting.append((page, namespace))
        if len(self._waiting) > 2 * self._catalog.slots:
            # Most of them have been evicted: a tier that is slower than the traffic must not make this grow for ever.
            there = {id(page): (page, namespace) for page, namespace in self._waiting if page.ready}
            self._lost += len(self._waiting) - len(there)
            self._waiting = deque(there.values())
        self._order_spills()

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until all pages stored so far are written, or could not be. False if that takes longer."""
        with self._all_written:
            return self._all_written.wait_for(lambda: not self._spilling and not self._waiting, seconds)

    def counts(self) -> dict[str, int]:
        """Return what was moved since the start (see `Mover.counts`), and how calls ended, by tier."""
        found = {**self._mover.counts, "lost": self._lost, "passed_over": self._finder.damaged}
        for tier in self.tiers:
            if isinstance(tier, Guarded):
                calls = tier.counts().values()
                for name in ("calls", "failures", "timeouts", "refused"):
                    found[f"{name}:{tier.name}"] = sum(getattr(each, name) for each in calls)
                found[f"hung:{tier.name}"] = tier.hung
        return found

    def usage(self) -> dict[str, Usage]:
        """Return what each tier holds, by name; nothing of those that do not answer."""
        found = {}
        for tier in self.tiers:
            with suppress(TierError):
                found[tier.name] = tier.usage()
        return found

    def close(self) -> None:
        """Write what waits to be written, within a few seconds, then let go of the tiers. A second call does nothing."""
        self.flush(_CLOSE_SECONDS)
        with self._lock:
            # Not ordered any more: the mover would refuse at once, on this thread and under this lock.
            self._closed = True
            self._order_spills()
        self._mover.close()

    # ---- inside

    def _match(self, ids: bytes, namespace: Namespace, reuse: Reuse, limit: int) -> Match:
        with self._lock:
            return self._catalog.match(ids, namespace, limit=limit, terms=reuse.terms)

    def _order_spills(self) -> None:
        """Order some of the spills that wait; none once the tiers are closed. Under the lock."""
        if self._closed:
            self._lost += len(self._waiting)
            self._waiting.clear()
            self._all_written.notify_all()
        while self._waiting and len(self._spilling) * _SPILL_SHARE < self._catalog.slots:
            page, namespace = self._waiting.popleft()
            if not page.ready:
                self._lost += 1  # evicted before its turn came
                continue
            self._tag += 1
            self._catalog.pin((page,), tail=page.start + page.tokens)
            self._spilling[self._tag] = page
            self._mover.spill(Spill(self._tag, record_of(page, namespace), page.slot, page.hidden_slot), self._spilled)

    def _spilled(self, tag: int, good: bool) -> None:
        with self._lock:
            self._catalog.unpin((self._spilling.pop(tag),))
            self._order_spills()
            self._all_written.notify_all()
