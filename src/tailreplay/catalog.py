"""Who decides: the tree of pages, token-level matching, pins and eviction. No tensors and no I/O.

A page moves through ``admit`` (it gets a slot; its bytes may be written) and ``commit`` (it can be matched), and leaves
by eviction. Every slot belongs to one page or is free, so the byte limit holds at all times.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailreplay.anchors import Anchors
from tailreplay.decisions import Admission, Match
from tailreplay.errors import CacheConfigError
from tailreplay.events import PageEvents
from tailreplay.eviction import LeastRecentlyUsed, Policy
from tailreplay.keys import TOKEN_BYTES, Namespace, page_key
from tailreplay.matching import longest_match
from tailreplay.page import Page, root_page
from tailreplay.provenance import ANY, Provenance, Terms
from tailreplay.quotas import Quotas
from tailreplay.room import Room
from tailreplay.sizes import format_bytes
from tailreplay.slots import divide
from tailreplay.stand_ins import StandIns


class Catalog:
    """Tree of pages over a fixed number of slots. Not thread-safe: `tailreplay.cache.PrefixCache` holds the lock.

    Parameters
    ----------
    page_size : int
        Tokens a page, a multiple of 16.
    limit_bytes : int
        Hard limit of the store.
    page_bytes : int
        Bytes of one page, its hiddens included.
    events : PageEvents, optional
        Is told what comes and goes.
    hidden_bytes : int
        Bytes of one page's hiddens.
    hidden_share : float
        In (0, 1]: for how many of the pages there is room for hiddens. Below 1 more pages fit, and the hiddens that no
        recent plan has read go first: a later hit there takes a shorter tail or a shorter match.
    policy : Policy, optional
        Which page goes first when room is needed; the least recently used if not given.
    quotas : Quotas, optional
        Limits and reserved shares by tenant.
    anchors : Anchors, optional
        Room for saved states, which is not part of `limit_bytes`; none if not given.

    Raises
    ------
    CacheConfigError
        If the page size is not a positive multiple of 16, the limit is smaller than one page, or the quotas cannot be kept.
    """

    def __init__(
        self,
        page_size: int,
        limit_bytes: int,
        page_bytes: int,
        events: PageEvents | None = None,
        *,
        hidden_bytes: int = 0,
        hidden_share: float = 1.0,
        policy: Policy | None = None,
        quotas: Quotas | None = None,
        anchors: Anchors | None = None,
    ) -> None:
        check_page_size(page_size)
        if limit_bytes < page_bytes:
            raise CacheConfigError(
                f"The cache limit of {format_bytes(limit_bytes)} is smaller than one page of {page_size} tokens "
                f"({format_bytes(page_bytes)}): raise the limit or lower the page size."
            )
        self.page_size = page_size
        self.slots, self.hidden_slots = divide(limit_bytes, page_bytes - hidden_bytes, hidden_bytes, hidden_share)
        self.quotas = quotas if quotas is not None else Quotas()
        self.quotas.check(limit_bytes, page_bytes)
        policy = policy if policy is not None else LeastRecentlyUsed()
        policy.sized(self.slots, page_size)
        self.anchors = anchors if anchors is not None else Anchors(0)
        self._events = events
        self._pages: dict[bytes, Page] = {}
        self._roots: dict[bytes, Page] = {}
        self._room = Room(
            self.slots,
            self.hidden_slots,
            page_bytes - hidden_bytes,
            hidden_bytes,
            policy,
            self.quotas,
            self._remove,
        )
        self._tick = 0
        self._pinned = 0
        self._order = 0
        self._stand_ins = StandIns(self._room)

    # ---- matching

    def match(self, ids: bytes, namespace: Namespace, *, limit: int, terms: Terms = ANY) -> Match:
        """Find the longest resident prefix. Changes nothing: pin the result before anything else runs.

        Parameters
        ----------
        ids : bytes
            Prompt, from `tailreplay.keys.token_bytes`.
        limit : int
            Longest useful match (the prompt's length less one, so that a token is left to run).
        terms : Terms
            Stop at the first page that they do not take.
        """
        root = self._roots.get(namespace.digest)
        if root is None or limit <= 0:
            return Match(0, (), "end" if limit <= 0 else "unseen")
        return longest_match(root, self._pages, self.page_size, ids, limit, terms)

    def pin(self, pages: Iterable[Page], tail: int | None = None) -> None:
        """Protect `pages` from eviction and mark them as just used.

        Parameters
        ----------
        tail : int, optional
            Position of the first token whose hiddens are read; none are if not given.
        """
        # One tick will do: a parent outlives its children whatever its tick.
        self._tick += 1
        for page in pages:
            page.last_used = self._tick
            if tail is not None and page.start + page.tokens > tail:
                page.hidden_used, page.hidden_read = self._tick, True
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
            root = root_page(namespace.digest, self._next_order(), namespace.tenant)
            self._roots[namespace.digest] = root
        return root

    def find(self, key: bytes, namespace: Namespace) -> Page | None:
        """Return the ready page of that key, or the root of `namespace` (made if need be) if it is its digest."""
        if key == namespace.digest:
            return self.root(namespace)
        page = self._pages.get(key)
        return page if page is not None and page.ready else None

    def admit(
        self, parent: Page, namespace: Namespace, ids: bytes, provenance: Provenance, hidden: bool = True
    ) -> Admission:
        """Make room for the page that holds `ids` after `parent`, evicting if need be.

        The page is pinned, and a new one cannot be matched until `commit`. `parent` must be pinned.

        Parameters
        ----------
        hidden : bool
            Whether there are hiddens to store. There may be no room for them even so: see `Page.has_hidden` of the fill.
        """
        assert parent.pins > 0, "pin the parent first"
        assert 0 < len(ids) <= self.page_size * TOKEN_BYTES
        assert parent.is_root or parent.tokens == self.page_size, "only full pages have children"
        key = page_key(parent.key, namespace.digest, ids)
        present = self._pages.get(key)
        if present is not None:
            return self._admit_again(present, ids, provenance, hidden)
        if parent.covers(ids, provenance):
            return Admission(None, reason="covered")
        slot = self._room.take(parent.tenant)
        if slot is None:
            return Admission(None, reason="full")
        page = Page(key, ids, parent, slot, provenance, self._next_order())
        self._room.give_hidden(page, hidden)
        page.pins = 1
        self._pinned += 1
        self._pages[key] = page
        parent.children += 1
        if self._events is not None:
            self._events.admitted(page, namespace)
        return Admission(page, fill=page)

    def add_hidden(self, fill: Page) -> None:
        """Let an admitted page have room for its hiddens after all, if there is any: somebody is about to read them."""
        assert not fill.ready
        fill.hidden_read = True
        self._room.give_hidden(fill, True)

    def commit(self, fill: Page) -> None:
        """Let an admitted page be matched; its bytes are complete. It keeps its pin. Earlier pages of a run first."""
        assert not fill.ready
        parent = fill.parent
        assert parent is not None
        assert parent.ready or parent.damaged, "commit the parent first"
        page = self._stand_ins.pop(fill)
        if page is not None:
            self._stand_ins.take_over(page, fill, self._tick)
        else:
            page = fill
            self._tick += 1
            page.last_used = page.hidden_used = self._tick
            page.ready, page.damaged = True, False
            parent.siblings(page.provenance).add(page)
            self._room.grown(page)
            if self._events is not None:
                self._events.stored(page)
        for shorter in parent.prefixes_of(page.ids):
            self._settle(shorter)  # may have become superfluous

    def abort(self, fill: Page) -> None:
        """Give an admitted page's slot back, and its pin; it was never matched. Later pages of a run first."""
        assert not fill.ready
        present = self._stand_ins.pop(fill)
        if present is not None:
            self._room.leave(fill)
            self.unpin((present,))
            return
        if fill.damaged:  # it should have been written again: it keeps its place while something needs that
            self.unpin((fill,))
            return
        self._room.leave(fill)
        assert fill.parent is not None
        if self._events is not None:
            self._events.aborted(fill)
        del self._pages[fill.key]
        self.anchors.page_gone(fill)
        self._pinned -= 1
        fill.parent.children -= 1
        self._settle(fill.parent)

    def condemn(self, page: Page) -> None:
        """Note that a page's bytes are wrong: it is not matched any more, and goes, or is written again when it can be."""
        if page.ready and not page.is_root:
            assert page.parent is not None
            page.parent.siblings(page.provenance).discard(page)
            page.ready, page.damaged = False, True
            self._settle(page)

    def clear(self) -> None:
        """Evict every page that nothing needs."""
        while (page := self._room.pop()) is not None:
            self._remove(page)

    # ---- accounting

    @property
    def pages(self) -> int:
        """Pages in the tree, admitted ones included."""
        return len(self._pages)

    @property
    def bytes_used(self) -> int:
        """Bytes of all slots in use, never above the limit."""
        return self._room.bytes_used

    @property
    def evictions(self) -> int:
        """Pages that made room for others since the start."""
        return self._room.evictions

    @property
    def stripped(self) -> int:
        """Pages whose hiddens made room for others' since the start."""
        return self._room.stripped

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
                self.anchors.page_gone(page)
            return
        assert page.parent is not None
        # A partial page goes at once when a longer one holds its tokens: nothing is lost.
        if page.is_evictable and (page.damaged or page.parent.covers(page.ids, page.provenance)):
            self._remove(page)
        else:
            self._room.free_to_go(page)

    def _remove(self, page: Page) -> None:
        assert page.is_evictable
        assert page.parent is not None
        if self._events is not None:
            self._events.removed(page)
        if page.ready:
            page.parent.siblings(page.provenance).discard(page)
        page.parent.children -= 1
        del self._pages[page.key]
        page.ready = page.damaged = False
        self.anchors.page_gone(page)
        self._room.leave(page)
        self._settle(page.parent)

    def _admit_again(self, present: Page, ids: bytes, provenance: Provenance, hidden: bool) -> Admission:
        """Admit tokens that are there already: as they are, with better bytes, or with hiddens that it lacks."""
        assert present.ids == ids, "blake3 collision"
        if present.damaged and not present.pins:
            present.provenance, present.pins = provenance, 1
            self._room.give_hidden(present, hidden)
            self._pinned += 1
            return Admission(present, fill=present)
        if not present.ready:
            return Admission(None, reason="busy")
        self.pin((present,))
        return Admission(present, fill=self._stand_ins.offer(present, provenance, hidden))


def check_page_size(page_size: int) -> None:
    """Raise `CacheConfigError` unless `page_size` is a positive multiple of 16."""
    if page_size <= 0 or page_size % 16:
        raise CacheConfigError(f"The page size must be a positive multiple of 16 tokens, got {page_size}.")
