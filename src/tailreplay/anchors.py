"""Which states are saved: room for anchors, and who leaves when there is none. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from tailreplay.anchor import Anchor
from tailreplay.eviction import Victims
from tailreplay.keys import TOKEN_BYTES
from tailreplay.page import Page
from tailreplay.provenance import Provenance
from tailreplay.quotas import Shares
from tailreplay.siblings import Siblings
from tailreplay.slots import SlotPool


class Anchors:
    """Hands out slots for saved states. Not thread-safe: the catalog that has it is not.

    What goes first has least value: tokens of replay that it saves, and how long ago it was of use (GreedyDual: an
    anchor's rank is what it saves above the rank that was evicted last, and is renewed by use). All have the same size.

    Parameters
    ----------
    slots : int
        How many there is room for.
    shares : Shares, optional
        Slots by tenant.

    Attributes
    ----------
    stored, evicted : int
        Anchors that were stored, and that made room for others, since the start.
    """

    def __init__(self, slots: int, shares: Shares | None = None) -> None:
        self.slots = slots
        self.stored = self.evicted = 0
        self._pool = SlotPool(slots)
        self._shares = shares if shares is not None else Shares()
        self._victims = Victims[Anchor](lambda anchor: anchor.rank, _is_free, self._shares)
        self._floor = 0.0
        self._order = 0

    @property
    def used(self) -> int:
        """Slots in use."""
        return self._pool.used

    def offer(self, parent: Page, ids: bytes, provenance: Provenance) -> Anchor | None:
        """Make room for the states after `ids` that follow `parent`, evicting if need be.

        The anchor is pinned, and is not found until `commit`. `parent` must be pinned.

        Parameters
        ----------
        ids : bytes
            At most a page of tokens; none for the states at the end of `parent`.

        Returns
        -------
        Anchor or None
            None if states that are no worse are there or on their way, if there is no room, or at a sequence's beginning.
        """
        if not ids and parent.parent is not None:
            parent, ids = parent.parent, parent.ids
        if not self.slots or not ids:
            return None
        present = _find(parent.anchors, ids)
        if present is not None and (not present.ready or present.provenance <= provenance):
            return None
        slot = self._take(parent.tenant)
        if present is not None and (slot is not None or not present.pins):
            self._unlist(present)
            slot = self._take(parent.tenant) if slot is None else slot
        if slot is None:
            return None
        self._order += 1
        anchor = Anchor(parent, ids, slot, provenance, self._order)
        anchor.gap = anchor.position - _before(anchor)
        anchor.pins = 1
        if parent.anchors is None:
            parent.anchors = Siblings()
        parent.anchors.add(anchor)
        return anchor

    def commit(self, anchor: Anchor) -> None:
        """Let an offered anchor be found, unless its page has gone meanwhile; its states are complete. Takes its pin."""
        assert not anchor.ready
        anchor.ready = anchor.listed
        self.stored += anchor.listed
        self.unpin(anchor)

    def abort(self, anchor: Anchor) -> None:
        """Give up an offered anchor, and take its pin."""
        assert not anchor.ready
        self._unlist(anchor)
        self.unpin(anchor)

    def pin(self, anchor: Anchor | None) -> None:
        """Protect an anchor that is about to be read."""
        if anchor is not None:
            anchor.pins += 1

    def unpin(self, anchor: Anchor | None) -> None:
        """Undo one `pin`, and note that it was of use."""
        if anchor is None:
            return
        assert anchor.pins > 0, "unpin without pin"
        anchor.pins -= 1
        if anchor.pins:
            return
        if anchor.listed:
            anchor.rank = self._floor + anchor.gap
            self._victims.push(anchor)
        else:
            self._free(anchor)

    def drop(self, anchor: Anchor) -> None:
        """Let an anchor not be found again: its bytes are wrong. Whoever reads it keeps its slot until then."""
        self._unlist(anchor)

    def page_gone(self, page: Page) -> None:
        """Let go of what nobody can reach any more, now that `page` has left the tree."""
        for anchor in list(page.anchors or ()):
            self._unlist(anchor)
        parent = page.parent
        if parent is None or parent.anchors is None:
            return
        same = _find(parent.anchors, page.ids)
        for anchor in [*parent.anchors.prefixes_of(page.ids), *([same] if same is not None else [])]:
            if anchor.ready and not parent.holds(anchor.ids):
                self._unlist(anchor)

    # ---- inside

    def _take(self, tenant: bytes) -> int | None:
        while not self._shares.fits(tenant):
            if not self._evict(self._victims.pop(tenant, own=True)):
                return None
        while (slot := self._pool.take()) is None:
            if not self._evict(self._victims.pop(tenant)):
                return None
        self._shares.add(tenant, 1)
        return slot

    def _evict(self, victim: Anchor | None) -> bool:
        if victim is None:
            return False
        self._floor = max(self._floor, victim.rank)
        self._unlist(victim)
        self.evicted += 1
        return True

    def _unlist(self, anchor: Anchor) -> None:
        """Let an anchor not be found any more; its slot is free once nobody reads or writes it."""
        if anchor.listed:
            assert anchor.parent.anchors is not None
            anchor.parent.anchors.discard(anchor)
            anchor.listed = anchor.ready = False
            if not anchor.pins:
                self._free(anchor)

    def _free(self, anchor: Anchor) -> None:
        self._pool.give_back(anchor.slot)
        self._shares.add(anchor.tenant, -1)
        anchor.slot = -1


def along(pages: Sequence[Page], tokens: int, ids: bytes, page_size: int) -> tuple[Anchor, ...]:
    """Return the anchors in a match of `tokens` tokens of `ids` that ends in the last of `pages`, in ascending order."""
    found: list[Anchor] = []
    for index, page in enumerate(pages):
        assert page.parent is not None
        held = page.parent.anchors
        if held:
            start = index * page_size
            part = ids[start * TOKEN_BYTES : min(start + page_size, tokens) * TOKEN_BYTES]
            whole = _find(held, part)
            found += [anchor for anchor in reversed(held.prefixes_of(part)) if anchor.ready]
            found += [whole] if whole is not None and whole.ready else []
    return tuple(found)


def _find(held: Siblings[Anchor] | None, ids: bytes) -> Anchor | None:
    return held.same(ids) if held else None


def _before(anchor: Anchor) -> int:
    """Position of the nearest anchor before this one; 0 if there is none."""
    page: Page | None = anchor.parent
    ids = anchor.ids
    while page is not None:
        before = page.anchors.prefixes_of(ids) if page.anchors else []
        if before:
            return before[0].position
        if page.parent is None:
            return 0
        whole = _find(page.parent.anchors, page.ids)
        if whole is not None:
            return whole.position
        ids, page = page.ids, page.parent
    return 0


def _is_free(anchor: Anchor) -> bool:
    return anchor.ready and not anchor.pins
