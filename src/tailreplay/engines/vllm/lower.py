"""The scheduler's half of the tiers below host memory: what to look for, bring up and write. Moves no bytes itself."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tailreplay.catalog import Catalog
from tailreplay.decisions import Match
from tailreplay.engines.vllm.tracked import Tracked
from tailreplay.keys import TOKEN_BYTES, Namespace, page_key
from tailreplay.page import Page
from tailreplay.tiers.base import Tier
from tailreplay.tiers.finder import Finder, FoundPage
from tailreplay.tiers.mover import Fetch, Spill
from tailreplay.tiers.naming import record_of
from tailreplay.tiers.promotion import Promotion, Search
from tailreplay.topology import Topology

_PATIENCE = 2.0
_SLOWEST = 50e6
_AT_ONCE = 8
# Pages that wait to be written are pinned: so many of all may be.
_SPILL_SHARE = 4

Answer = tuple[list[FoundPage], list[FoundPage | None]]


@dataclass
class _Wish:
    """What one request waits for: an answer from the tiers, then its pages."""

    tracked: Tracked
    ids: bytes
    limit: int
    until: float
    answer: Future[Answer]
    promotion: Promotion | None = None
    keys: list[bytes] = field(default_factory=list)


class LowerSide:
    """Looks prompts up on threads beside the scheduler, and orders workers to fetch and to write. One thread calls it.

    Parameters
    ----------
    ranks : sequence of str
        Ranks that each hold a share of every page: an order has ended when all of them have ended it.
    tiers : sequence of Tier
        Fastest first; used for look-ups only.
    lossy : bool
        Whether the workers' host memory holds pages in a lossy codec.
    """

    def __init__(
        self,
        catalog: Catalog,
        topology: Topology,
        ranks: Sequence[str],
        tiers: Sequence[Tier],
        counts: Counter[str],
        lossy: bool = False,
    ) -> None:
        self._lossy = lossy
        self._catalog = catalog
        self._topology = topology
        self._ranks = len(ranks)
        self._tiers = tiers
        self._finder = Finder(tiers, catalog.page_size, ranks)
        self._threads = ThreadPoolExecutor(2, "tailreplay-find")
        self._counts = counts
        self._wishes: dict[str, _Wish] = {}
        self._fetching: dict[int, _Wish] = {}
        self._coming: Counter[bytes] = Counter()
        self._spilling: dict[int, Page] = {}
        self._waiting: deque[tuple[Page, Namespace]] = deque()
        self._moved: dict[int, tuple[int, int]] = {}
        self._tag = 0
        self._fetches: list[Fetch] = []
        self._spills: list[Spill] = []

    # ---- look-ups

    def begin(self, tracked: Tracked, ids: bytes, match: Match) -> None:
        """Look for what the tiers hold of a prompt beyond `match`, if that is of use. Twice a request at most."""
        looks = 2 if tracked.look_again else 1
        if tracked.looked_below >= looks or tracked.options.reuse.mode == "off":
            return
        tracked.looked_below += 1
        limit = len(ids) // TOKEN_BYTES - 1
        search = Search(match, tracked.namespace, self._catalog.page_size, tracked.options.reuse, self._topology)
        if match.tokens >= limit and not search.lacking:
            return
        name, now = tracked.request.request_id, time.monotonic()
        answer = self._threads.submit(self._ask, ids, tracked.namespace, search)
        self._wishes[name] = _Wish(tracked, ids, limit, now + _PATIENCE, answer)

    def waits(self, tracked: Tracked, ids: bytes, match: Match) -> bool:
        """Whether more of a request's prefix is on its way up, and worth waiting for."""
        name = tracked.request.request_id
        self.begin(tracked, ids, match)
        self._advance(name)
        wish = self._wishes.get(name)
        if wish is not None:
            if time.monotonic() < wish.until:
                return True
            self._counts["late_tiers"] += 1
            self.forget(name)
            return False
        # Another request may be bringing up just this prefix.
        return self._is_coming(tracked.namespace, ids, match) and time.monotonic() - tracked.first_asked < _PATIENCE

    def advance(self) -> None:
        """Order what has been found for requests that still queue, so that it is there when their turn comes."""
        for name in list(self._wishes):
            self._advance(name)

    def forget(self, request: str) -> None:
        """A request needs no answer any more; what is on its way for it still comes."""
        wish = self._wishes.pop(request, None)
        if wish is not None:
            wish.answer.cancel()

    # ---- orders

    def spill_with(self, page: Page, namespace: Namespace) -> Spill | None:
        """Return an order to write a page that is just being stored; None if too many wait. `moved` ends it.

        The page must stay pinned until then, and keep its slots even if it is given up.
        """
        return self._order(page, namespace) if self._has_room else None

    def spill(self, page: Page, namespace: Namespace) -> None:
        """Have a page that can be matched written, some time later, if it is still there then."""
        self._waiting.append((page, namespace))

    def take_orders(self) -> tuple[list[Fetch], list[Spill]]:
        """Return the orders since the last call."""
        while self._waiting and self._has_room:
            page, namespace = self._waiting.popleft()
            if page.ready:
                self._catalog.pin((page,), tail=page.start + page.tokens)
                self._spills.append(self._order(page, namespace))
            else:
                self._counts["unwritten_pages"] += 1  # evicted before its turn came
        taken = self._fetches, self._spills
        self._fetches, self._spills = [], []
        return taken

    @property
    def is_writing(self) -> bool:
        """Whether pages wait to be written, or for word that they have been: both need further steps."""
        return bool(self._spilling or self._waiting)

    def moved(self, ended: dict[int, tuple[int, int]]) -> list[tuple[int, Page]]:
        """Take ranks' reports: tag -> how many ended it, how many of these failed. Returns spills that have ended."""
        spilled = []
        for tag, (count, failures) in ended.items():
            before = self._moved.pop(tag, (0, 0))
            count, failures = count + before[0], failures + before[1]
            if count < self._ranks:
                self._moved[tag] = count, failures
            elif tag in self._spilling:
                spilled.append((tag, self._spilling.pop(tag)))
                self._counts["written_pages" if not failures else "unwritten_pages"] += 1
            elif tag in self._fetching:
                self._fetched(tag, not failures)
        return spilled

    def close(self) -> None:
        """End the threads and let go of the tiers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for tier in self._tiers:
            tier.close()

    # ---- inside

    @property
    def _has_room(self) -> bool:
        return len(self._spilling) * _SPILL_SHARE < self._catalog.slots

    def _order(self, page: Page, namespace: Namespace) -> Spill:
        self._tag += 1
        self._spilling[self._tag] = page
        return Spill(self._tag, record_of(page, namespace), page.slot, page.hidden_slot)

    def _ask(self, ids: bytes, namespace: Namespace, search: Search) -> Answer:
        """Ask the tiers. On a thread of its own."""
        found = self._finder.find(ids, namespace, search.start, search.parent)
        return found, self._finder.pages(search.lacking) if search.lacking else []

    def _advance(self, name: str) -> None:
        """Order what has been found for a request, once it has."""
        wish = self._wishes.get(name)
        if wish is None or wish.promotion is not None or not wish.answer.done():
            return
        if len({id(each.promotion) for each in self._fetching.values()}) >= _AT_ONCE:
            return
        found, lacking = wish.answer.result()
        promotion = Promotion(
            self._catalog,
            wish.tracked.namespace,
            wish.ids,
            wish.limit,
            wish.tracked.options.reuse,
            self._topology,
            [page for page in lacking if page is not None],
            found,
            self._tag,
            self._lossy,
        )
        if not promotion.orders:
            promotion.finish()
            self._wishes.pop(name)
            return
        self._tag += len(promotion.orders)
        wish.promotion = promotion
        nbytes = 0
        for order in promotion.orders:
            self._fetching[order.tag] = wish
            wish.keys.append(order.record.key)
            nbytes += sum(size for *_, size in order.slots)
        self._coming.update(wish.keys)
        wish.until = time.monotonic() + _PATIENCE + nbytes / _SLOWEST
        self._fetches += promotion.orders

    def _fetched(self, tag: int, good: bool) -> None:
        wish = self._fetching.pop(tag)
        assert wish.promotion is not None
        wish.tracked.look_again |= not good
        if not wish.promotion.end(tag, good):
            return
        self._counts["fetched_pages"] += wish.promotion.finish()
        self._coming -= Counter(wish.keys)
        for name, other in list(self._wishes.items()):
            if other is wish:
                del self._wishes[name]

    def _is_coming(self, namespace: Namespace, ids: bytes, match: Match) -> bool:
        """Whether the page after `match` is on its way up for another request."""
        if not self._coming:
            return False
        size = self._catalog.page_size
        whole = match.tokens // size
        parent = match.pages[whole - 1].key if whole else namespace.digest
        step = size * TOKEN_BYTES
        return page_key(parent, namespace.digest, ids[whole * step : (whole + 1) * step]) in self._coming
