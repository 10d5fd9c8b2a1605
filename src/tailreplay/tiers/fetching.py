"""Bringing pages up: bytes of tiers, checked, into slots of host memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from tailreplay.page_format import PageFormatError, PageHeader, is_intact, unpack_header
from tailreplay.tiers.base import HIDDEN, KV, Found, Tier, TierError
from tailreplay.tiers.batches import by_count
from tailreplay.tiers.naming import rank_key
from tailreplay.tiers.orders import BATCH_PAGES, Fetch, cut
from tailreplay.tiers.packing import Packer, WorsePageError

log = logging.getLogger("tailreplay")
Known = tuple[bytes, PageHeader]
"""A header as it is stored, and what it says."""
Headers = dict[tuple[int, bytes], Known]
"""By index of the tier, and key."""


class Fetcher:
    """Fetches pages. One thread calls it.

    Parameters
    ----------
    seal : bool
        Whether to note checksums of what was fetched.
    counts : Counter
        See `tailreplay.tiers.mover.Mover.counts`.
    """

    def __init__(self, packer: Packer, tiers: Sequence[Tier], seal: bool, counts: Counter[str]) -> None:
        self._packer = packer
        self._tiers = tiers
        self._seal = seal
        self.counts = counts

    def fetch(self, orders: Sequence[Fetch]) -> Iterator[tuple[Sequence[Fetch], set[int]]]:
        """Bring pages batch by batch; yields each batch and the tags of those of it that have come as a whole.

        Raises nothing: a batch that meets an unforeseen error has not come.
        """
        # A look-up is a round trip, and headers are small: one for many pages, however large they are.
        for group in by_count(orders, BATCH_PAGES):
            headers: Headers | None = None
            for batch in cut(group, lambda order: sum(size for *_, size in order.slots)):
                good: set[int] = set()
                try:
                    if headers is None:
                        headers = self._look_up(group)
                    good = self._fetch(batch, headers)
                except Exception:
                    log.exception("Fetching pages failed; what they hold is computed.")
                yield batch, good

    def _look_up(self, orders: Sequence[Fetch]) -> Headers:
        """Return what is there of the pages that are to be brought."""
        headers: Headers = {}
        for index, tier in enumerate(self._tiers):
            mine = {self._key(order): order for order in orders if any(slot[2] == index for slot in order.slots)}
            if not mine:
                continue
            try:
                for (key, order), found in zip(mine.items(), tier.contains(list(mine)), strict=True):
                    header = self._header(tier, key, found, order)
                    if found is not None and header is not None:
                        headers[index, key] = found.header, header
            except TierError as error:
                log.debug("Fetching from %s: %s", tier.name, error)
                self.counts[f"fetch_failed:{tier.name}"] += len(mine)
        return headers

    def _fetch(self, orders: Sequence[Fetch], headers: Headers) -> set[int]:
        """Bring a batch; returns the tags of pages all of whose parts have come."""
        missing: set[int] = set()
        # Hiddens first: they are what a replay begins with.
        for part in (HIDDEN, KV):
            for index, tier in enumerate(self._tiers):
                wanted = [
                    (order.tag, slot, headers.get((index, self._key(order))))
                    for order in orders
                    for name, slot, source, _ in order.slots
                    if (name, source) == (part, index)
                ]
                there = [(tag, slot, known) for tag, slot, known in wanted if known and part in known[1].parts]
                missing |= {tag for tag, *_ in wanted} - (self._fetch_part(tier, part, there) if there else set())
        return {order.tag for order in orders} - missing

    def _fetch_part(self, tier: Tier, part: str, wanted: Sequence[tuple[int, int, Known]]) -> set[int]:
        """Bring one part of pages (tag, slot, header); returns the tags of those that have come."""
        came: set[int] = set()
        try:
            keys = [rank_key(known[1].key, self._packer.rank) for *_, known in wanted]
            for key, data, (tag, slot, known) in zip(keys, tier.get(keys, part), wanted, strict=True):
                if data is not None and self._take(tier, part, known, key, data, slot):
                    came.add(tag)
        except TierError as error:
            log.debug("Fetching from %s: %s", tier.name, error)
            self.counts[f"fetch_failed:{tier.name}"] += len(wanted) - len(came)
        return came

    def _key(self, order: Fetch) -> bytes:
        return rank_key(order.record.key, self._packer.rank)

    def _header(self, tier: Tier, key: bytes, found: Found | None, order: Fetch) -> PageHeader | None:
        """Return the page's checked header; None, and the page is dropped, if it is not what was looked up."""
        if found is None:
            return None
        try:
            header = unpack_header(found.header)
            self._packer.check(header, order.record)
        except WorsePageError as error:
            log.debug("Not fetched: %s", error)
            return None
        except PageFormatError as error:
            self._condemn(tier, key, str(error))
            return None
        return header

    def _take(self, tier: Tier, part: str, known: Known, key: bytes, data: memoryview, slot: int) -> bool:
        seen, header = known
        entry = header.parts[part]
        if not is_intact(entry, data):
            (now,) = tier.contains([key])
            # Somebody may have put better bytes there since the header was read.
            if now is not None and now.header == seen:
                self._condemn(tier, key, "its bytes are not what was stored")
            return False
        self._packer.unpack(part, entry, data, slot)
        if self._seal:
            self._packer.seal(part, slot, header.tokens)
        self.counts[f"fetch_bytes:{tier.name}"] += entry.nbytes
        return True

    def _condemn(self, tier: Tier, key: bytes, why: str) -> None:
        """Drop a page that must not be used."""
        if not self.counts["damaged"]:
            log.warning("A page in the %s tier is dropped: %s (further ones are only counted).", tier.name, why)
        self.counts["damaged"] += 1
        try:
            tier.drop([key])
        except TierError:
            log.debug("The page could not be dropped.")
