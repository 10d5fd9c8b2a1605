"""Who decides: the tree of pages, token-level matching, pins and eviction. No tensors and no I/O.

A page moves through ``admit`` (it gets a slot; its bytes may be written) and ``commit`` (it can be matched), and leaves
by eviction. Every slot belongs to one page or is free, so the byte limit holds at all times.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailreplay.decisions import Admission, Match
from tailreplay.errors import CacheConfigError
from tailreplay.events import PageEvents
from tailreplay.eviction import LeastRecentlyUsed
from tailreplay.keys import TOKEN_BYTES, Namespace, page_key
from tailreplay.page import Page, root_page
from tailreplay.provenance import Provenance
from tailreplay.sizes import format_bytes
from tailreplay.slots import SlotPool


class Catalog:
    """Tree of pages over a fixed number of slots. Not thread-safe: `tailreplay.cache.PrefixCache` holds the lock.

    Parameters
    ----------
    page_size : int
        Tokens a page, a multiple of 16.
    limit_bytes : int
        Hard limit of the store.
    page_bytes : int
        Bytes of one page's slot.
    events : PageEvents, optional
        Is told what comes and goes.

    Raises
    ------
    CacheConfigError
        If the page size is not a positive multiple of 16 or the limit is smaller than one page.
    """

    def __init__(self, page_size: int, limit_bytes: int, page_bytes: int, events: PageEvents | None = None) -> None:
        check_page_size(page_size)
        if limit_bytes < page_bytes:
            raise CacheConfigError(
                f"The cache limit of {format_bytes(limit_bytes)} is smaller than one page of {page_size} tokens "
                f"({format_bytes(page_bytes)}): raise the limit or lower the page size."
            )
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.slots = limit_bytes // page_bytes
        self.evictions = 0
        self._events = events
        self._pages: dict[bytes, Page] = {}
        self._roots: dict[bytes, Page] = {}
        self._free = SlotPool(self.slots)
        self._lru = LeastRecentlyUsed()
        self._tick = 0
        self._pinned = 0
        self._order = 0
        # Stand-ins with better bytes for a page that is there already -> that page.
        self._replacing: dict[Page, Page] = {}

    # ---- matching

    def match(self, ids: bytes, namespace: Namespace, *, limit: int, exact_only: bool = False) -> Match:
        """Find the longest resident prefix. Changes nothing: pin the result before anything else runs.

        Parameters
        ----------
        ids : bytes
            Prompt, from `tailreplay.keys.token_bytes`.
        limit : int
            Longest useful match (the prompt's length less one, so that a token is left to run).
        exact_only : bool
            Stop at the first page whose provenance is not exact.
        """
        node = self._roots.get(namespace.digest)
        if node is None or limit <= 0:
            return Match(0, (), "end" if limit <= 0 else "unseen")
        digest, pages, step = namespace.digest, self._pages, self.page_size * TOKEN_BYTES
        path: list[Page] = []
        at = 0
        while at + step <= len(ids):
            part = ids[at : at + step]
            page = pages.get(page_key(node.key, digest, part))
            # The ids are compared again, so that a hash collision can never serve another prompt's page.
            if page is None or not page.ready or page.ids != part or (exact_only and not page.provenance.is_exact):
                break
            path.append(page)
            node, at = page, at + step
        tokens = at // TOKEN_BYTES
        stop = "end"
        if tokens < limit:
            rest = ids[at : at + step]
            last, common = node.longest_child(rest, exact_only)
            if last is not None:
                path.append(last)
                tokens += common
            if tokens < limit:
                stop = _why_no_more(node, rest, common, exact_only)
        tokens = min(tokens, limit)
        return Match(tokens, tuple(path[: -(-tokens // self.page_size)]), stop)

    def pin(self, pages: Iterable[Page]) -> None:
        """Protect `pages` from eviction and mark them as just used."""
        # One tick will do: a parent outlives its children whatever its tick.
        self._tick += 1
        for page in pages:
            page.last_used = self._tick
            self._pinned += not page.pins and not page.is_root
            page.pins += 1

    def unpin(self, pages: Iterable[Page]) -> None:
        """Undo one `pin` of each page."""
        for page in pages:
            assert page.pins > 0, "unpin without pin"
            page.pins -= 1
            self._pinned -= not page.pins and not page.is_root
            self._settle(page)

    # ---- writing

    def root(self, namespace: Namespace) -> Page:
        """Return the root of `namespace`, made if need be. Pin it before the next call."""
        root = self._roots.get(namespace.digest)
        if root is None:
            root = self._roots[namespace.digest] = root_page(namespace.digest, self._next_order())
        return root

    def admit(self, parent: Page, namespace: Namespace, ids: bytes, provenance: Provenance) -> Admission:
        """Make room for the page that holds `ids` after `parent`, evicting if need be.

        The page is pinned, and a new one cannot be matched until `commit`. `parent` must be pinned.
        """
        assert parent.pins > 0, "pin the parent first"
        assert 0 < len(ids) <= self.page_size * TOKEN_BYTES
        assert parent.is_root or parent.tokens == self.page_size, "only full pages have children"
        key = page_key(parent.key, namespace.digest, ids)
        present = self._pages.get(key)
        if present is not None:
            return self._admit_again(present, ids, provenance)
        if parent.covers(ids, provenance):
            return Admission(None, reason="covered")
        slot = self._allocate()
        if slot is None:
            return Admission(None, reason="full")
        page = Page(key, ids, parent, slot, provenance, self._next_order())
        page.pins = 1
        self._pinned += 1
        self._pages[key] = page
        parent.children += 1
        if self._events is not None:
            self._events.admitted(page, namespace)
        return Admission(page, fill=page)

    def commit(self, fill: Page) -> None:
        """Let an admitted page be matched; its bytes are complete. It keeps its pin. Earlier pages of a run first."""
        assert not fill.ready
        parent = fill.parent
        assert parent is not None
        assert parent.ready or parent.damaged, "commit the parent first"
        page = self._replacing.pop(fill, None)
        if page is not None:
            self._replace(page, fill)
        else:
            page = fill
            self._tick += 1
            page.last_used = self._tick
            page.ready, page.damaged = True, False
            parent.siblings(page.provenance.is_exact).add(page)
            if self._events is not None:
                self._events.stored(page)
        for shorter in parent.prefixes_of(page.ids):
            self._settle(shorter)  # may have become superfluous

    def abort(self, fill: Page) -> None:
        """Give an admitted page's slot back, and its pin; it was never matched. Later pages of a run first."""
        assert not fill.ready
        present = self._replacing.pop(fill, None)
        if present is not None:
            self._free.give_back(fill.slot)
            self.unpin((present,))
            return
        if fill.damaged:  # it should have been written again: it keeps its place while something needs that
            self.unpin((fill,))
            return
        self._free.give_back(fill.slot)
        assert fill.parent is not None
        if self._events is not None:
            self._events.aborted(fill)
        del self._pages[fill.key]
        self._pinned -= 1
        fill.parent.children -= 1
        self._settle(fill.parent)

    def condemn(self, page: Page) -> None:
        """Note that a page's bytes are wrong: it is not matched any more, and goes, or is written again when it can be."""
        if page.ready and not page.is_root:
            assert page.parent is not None
            page.parent.siblings(page.provenance.is_exact).discard(page)
            page.ready, page.damaged = False, True
            self._settle(page)

    def clear(self) -> None:
        """Evict every page that nothing needs."""
        while (page := self._lru.pop()) is not None:
            self._remove(page)

    # ---- accounting

    @property
    def pages(self) -> int:
        """Pages in the tree, admitted ones included."""
        return len(self._pages)

    @property
    def bytes_used(self) -> int:
        """Bytes of all slots in use, never above the limit."""
        return self._free.used * self.page_bytes

    @property
    def namespaces(self) -> int:
        """Namespaces that have pages or pins."""
        return len(self._roots)

    @property
    def pinned(self) -> int:
        """Pages that are pinned now."""
        return self._pinned

    def resident(self, damaged: bool = False) -> list[Page]:
        """All ready pages, and damaged ones if asked, oldest first. For tests and tools: O(pages)."""
        pages = (page for page in self._pages.values() if page.ready or (damaged and page.damaged))
        return sorted(pages, key=lambda page: page.order)

    # ---- inside

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _settle(self, page: Page) -> None:
        """Do what is due once nothing needs `page` any more; nothing if something still does."""
        if page.is_root:
            if not page.children and not page.pins:
                self._roots.pop(page.key, None)
        elif page.is_evictable:
            # A partial page goes at once when a longer one holds its tokens: nothing is lost.
            if page.damaged or (page.parent is not None and page.parent.covers(page.ids, page.provenance)):
                self._remove(page)
            else:
                self._lru.push(page)

    def _allocate(self) -> int | None:
        slot = self._free.take()
        if slot is None:
            victim = self._lru.pop()
            if victim is None:
                return None
            self._remove(victim)
            self.evictions += 1
            slot = self._free.take()
        return slot

    def _remove(self, page: Page) -> None:
        assert page.is_evictable
        assert page.parent is not None
        if self._events is not None:
            self._events.removed(page)
        if page.ready:
            page.parent.siblings(page.provenance.is_exact).discard(page)
        page.parent.children -= 1
        del self._pages[page.key]
        page.ready = page.damaged = False
        self._free.give_back(page.slot)
        self._settle(page.parent)

    def _admit_again(self, present: Page, ids: bytes, provenance: Provenance) -> Admission:
        """Admit tokens that are there already: as they are, or with better bytes."""
        assert present.ids == ids, "blake3 collision"
        if present.damaged and not present.pins:
            present.provenance, present.pins = provenance, 1
            self._pinned += 1
            return Admission(present, fill=present)
        if not present.ready:
            return Admission(None, reason="busy")
        self.pin((present,))
        # Somebody may be reading a page that is pinned twice: a better copy waits for a later request.
        if present.provenance <= provenance or present.pins > 1:
            return Admission(present)
        slot = self._allocate()
        if slot is None:
            return Admission(present)
        fill = Page(present.key, ids, present.parent, slot, provenance, present.order)
        self._replacing[fill] = present
        return Admission(present, fill=fill)

    def _replace(self, present: Page, fill: Page) -> None:
        """Swap the bytes of a resident page for better ones of the same tokens, unless somebody reads it."""
        if present.pins > 1 or present.provenance <= fill.provenance:
            self._free.give_back(fill.slot)
            return
        assert present.parent is not None
        if present.ready:
            present.parent.siblings(present.provenance.is_exact).discard(present)
        self._free.give_back(present.slot)
        present.slot, present.provenance = fill.slot, fill.provenance
        present.ready, present.damaged = True, False
        present.parent.siblings(present.provenance.is_exact).add(present)


def _why_no_more(node: Page, rest: bytes, common: int, exact_only: bool) -> str:
    """Say why a match ends `common` tokens into `rest`, what follows `node` (see `Match.stop`)."""
    if exact_only and node.longest_child(rest, exact_only=False)[1] > common:
        return "approximate"
    return "diverged" if node.continues(rest[: common * TOKEN_BYTES]) else "unseen"


def check_page_size(page_size: int) -> None:
    """Raise `CacheConfigError` unless `page_size` is a positive multiple of 16."""
    if page_size <= 0 or page_size % 16:
        raise CacheConfigError(f"The page size must be a positive multiple of 16 tokens, got {page_size}.")
