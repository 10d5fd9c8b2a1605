"""Room for pages: slots of fixed numbers, and who leaves when there are none."""

from __future__ import annotations

from collections.abc import Callable

from tailreplay.eviction import Policy, Victims
from tailreplay.page import Page
from tailreplay.quotas import Quotas
from tailreplay.slots import SlotPool

# Hiddens of the last so many tokens of a sequence, or of this share of it if that is more, are likely to be read: whoever
# goes on from there replays twice as little by default.
NEAR_TOKENS, NEAR_SHARE = 128, 0.1


class Room:
    """Hands out slots for keys and values, and for hiddens, and makes room by eviction. Limits hold at all times.

    Parameters
    ----------
    slots, hidden_slots : int
        How many of each.
    kv_bytes, hidden_bytes : int
        Of one slot.
    remove : callable
        Takes a page out of the tree; must call `leave`.

    Attributes
    ----------
    evictions, stripped : int
        Pages that made room for others, and pages whose hiddens did, since the start.
    """

    def __init__(
        self,
        slots: int,
        hidden_slots: int,
        kv_bytes: int,
        hidden_bytes: int,
        policy: Policy,
        quotas: Quotas,
        remove: Callable[[Page], None],
    ) -> None:
        self.slots, self.hidden_slots = slots, hidden_slots
        self.evictions = self.stripped = 0
        self._kv_bytes, self._hidden_bytes = kv_bytes, hidden_bytes
        self._remove = remove
        self._kv, self._hidden = SlotPool(slots), SlotPool(hidden_slots)
        self._kv_shares, self._hidden_shares = quotas.divide(slots, hidden_slots, kv_bytes, hidden_bytes)
        self._pages = Victims(policy.rank, lambda page: page.is_evictable, self._kv_shares)
        self._hiddens = Victims(_hidden_rank, lambda page: page.is_strippable, self._hidden_shares)
        # Where every page has room for hiddens, none ever loses them alone.
        self._strips = hidden_slots < slots

    @property
    def bytes_used(self) -> int:
        """Bytes of all slots in use."""
        return self._kv.used * self._kv_bytes + self._hidden.used * self._hidden_bytes

    def free_to_go(self, page: Page) -> None:
        """Note that nothing needs `page`, or only its hiddens, any more."""
        if page.is_evictable:
            self._pages.push(page)
        if self._strips and page.is_strippable:
            self._hiddens.push(page)

    def grown(self, page: Page) -> None:
        """Note that a sequence goes on up to `page`: hiddens that are now far from its end, and never were read, go first.

        Without this a new sequence's hiddens, most of which nobody will read, push out those that others need.
        """
        if not self._strips:
            return
        end = page.start + page.tokens
        near = end - max(NEAR_TOKENS, int(NEAR_SHARE * end))
        above = page.parent
        while above is not None and above.start >= near and above.start:
            above = above.parent
        if above is not None and not above.is_root and above.start < near and not above.hidden_read:
            above.hidden_used = 0
            self.free_to_go(above)

    def take(self, tenant: bytes) -> int | None:
        """Return a slot for keys and values, in use from now on; None if every page is needed or spoken for."""
        while not self._kv_shares.fits(tenant):
            if not self._evict(self._pages.pop(tenant, own=True)):
                return None
        while (slot := self._kv.take()) is None:
            if not self._evict(self._pages.pop(tenant)):
                return None
        self._kv_shares.add(tenant, 1)
        return slot

    def take_hidden(self, tenant: bytes) -> int:
        """Return a slot for hiddens, in use from now on; -1 if there is none to be had."""
        while not self._hidden_shares.fits(tenant):
            if not self._strip(self._hiddens.pop(tenant, own=True)):
                return -1
        while (slot := self._hidden.take()) is None:
            if not self._strip(self._hiddens.pop(tenant)):
                return -1
        self._hidden_shares.add(tenant, 1)
        return slot

    def give_hidden(self, page: Page, wanted: bool) -> None:
        """Let `page` have a slot for hiddens if there is one to be had, or none if it is not wanted."""
        if not wanted:
            self.strip(page)
        elif not page.has_hidden:
            page.hidden_slot = self.take_hidden(page.tenant)

    def leave(self, page: Page) -> None:
        """Give back the slots of `page`, which has none from now on."""
        if page.slot >= 0:
            self._kv.give_back(page.slot)
            self._kv_shares.add(page.tenant, -1)
            page.slot = -1
        self.strip(page)

    def strip(self, page: Page) -> None:
        """Give back the slot of a page's hiddens, if it has any."""
        if page.hidden_slot >= 0:
            self._hidden.give_back(page.hidden_slot)
            self._hidden_shares.add(page.tenant, -1)
            page.hidden_slot = -1

    def pop(self) -> Page | None:
        """Return some page that may go; the caller removes it. None if none may."""
        return self._pages.pop()

    def _evict(self, victim: Page | None) -> bool:
        if victim is not None:
            self._remove(victim)
            self.evictions += 1
        return victim is not None

    def _strip(self, victim: Page | None) -> bool:
        if victim is not None:
            self.strip(victim)
            self.stripped += 1
        return victim is not None


def _hidden_rank(page: Page) -> float:
    return page.hidden_used
