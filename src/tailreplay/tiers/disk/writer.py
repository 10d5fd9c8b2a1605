"""Changes of a disk tier's records inside one write transaction: pages, their order and the totals move together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tailreplay.tiers.base import PARTS, Found, TierPage
from tailreplay.tiers.batches import contiguous
from tailreplay.tiers.disk.records import ABSENT, ALL_KEY, TENANT, Record, Tables, Total, tick_of
from tailreplay.tiers.merging import Merge, merge

# A record of at most this many bytes shares a page of the file with others.
_INLINE = 1024


class Writer:
    """The changes of one transaction.

    Parameters
    ----------
    txn : Transaction
        Write transaction with buffers.
    tables : Tables
    """

    def __init__(self, txn: Any, tables: Tables) -> None:
        self.txn, self.tables = txn, tables
        self.all = Total.unpack(txn.get(ALL_KEY, db=tables.total))
        self._tenants: dict[bytes, Total] = {}

    def tenant(self, name: bytes) -> Total:
        """Return the totals of one tenant, for reading and changing."""
        if name not in self._tenants:
            self._tenants[name] = Total.unpack(self.txn.get(TENANT + name, db=self.tables.total))
        return self._tenants[name]

    def tenants(self) -> Iterator[bytes]:
        """Yield every tenant that has pages."""
        names = {name for name, total in self._tenants.items() if total.pages}
        yield from names
        stored = [name for name, _ in stored_tenants(self.txn, self.tables)]
        yield from (name for name in stored if name not in self._tenants)

    def save(self) -> None:
        """Write the totals; the last thing before the commit."""
        total = self.tables.total
        self.txn.put(ALL_KEY, self.all.pack(), db=total)
        for name, each in self._tenants.items():
            if each.pages:
                self.txn.put(TENANT + name, each.pack(), db=total)
            else:
                self.txn.delete(TENANT + name, db=total)

    def record(self, key: bytes) -> Record | None:
        """Return what is known of a page."""
        data = self.txn.get(key, db=self.tables.page)
        return None if data is None else Record.unpack(data)

    def ticks(self, count: int) -> Iterable[int]:
        """Return the next ticks, latest first: of a chain that is used at once, the end is evicted before the start."""
        first = max(self.all.tick + 1, time.time_ns())
        self.all.tick = first + count - 1
        return range(self.all.tick, first - 1, -1)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used, the first one last."""
        for key, tick in zip(keys, self.ticks(len(keys)), strict=True):
            record = self.record(key)
            if record is not None:
                self._store(key, record, replace(record, tick=tick))

    def insert(self, page: TierPage, tick: int, over: bool) -> None:
        """Store a page; `over` whatever is there, or only what it lacks."""
        old = self.record(page.key)
        if over and old is not None:
            self.remove(page.key, old)
            old = None
        found = None
        if old is not None:
            header = bytes(self.txn.get(page.key, b"", db=self.tables.header))
            found = Found(header, old.parts)
        change = merge(found, page) or Merge(b"", {})
        new = replace(old, tick=tick) if old else Record(tick, page.tenant)
        hints = tuple(dict.fromkeys((*new.hints, *page.hints)))
        new = replace(new, hints=hints)
        if change.header:
            self.txn.put(page.key, change.header, db=self.tables.header)
            new = replace(new, header=len(change.header))
        for name in change.drop:
            self.txn.delete(page.key, db=self.tables.part(name))
            new = new.with_part(name, ABSENT)
        for name, buffers in change.parts.items():
            data = contiguous(buffers)
            self.txn.put(page.key, data, db=self.tables.part(name))
            new = new.with_part(name, len(data))
        for hint in page.hints:
            self.txn.put(hint, page.key, db=self.tables.hint)
        self._store(page.key, old, new)

    def remove(self, key: bytes, record: Record) -> None:
        """Remove a page."""
        self.txn.delete(key, db=self.tables.header)
        for part in record.parts:
            self.txn.delete(key, db=self.tables.part(part))
        for hint in record.hints:
            # Another page may have been put with the same hint since.
            if self.txn.get(hint, db=self.tables.hint) == key:
                self.txn.delete(hint, db=self.tables.hint)
        self._store(key, record, None)

    def remove_part(self, key: bytes, record: Record, part: str) -> None:
        """Remove one part of a page, and the page if no other part is left."""
        if part not in record.parts:
            return
        if record.parts == {part}:
            self.remove(key, record)
            return
        self.txn.delete(key, db=self.tables.part(part))
        self._store(key, record, record.with_part(part, ABSENT))

    def _store(self, key: bytes, old: Record | None, new: Record | None) -> None:
        """Replace a page's record, in the orders and the totals too."""
        order = self.tables.order
        for record, sign in ((old, -1), (new, 1)):
            if record is None:
                continue
            for total in (self.all, self.tenant(record.tenant)):
                total.nbytes += sign * record.nbytes
                total.pages += sign
            for at in record.order_keys():
                if sign < 0:
                    self.txn.delete(at, db=order)
                else:
                    self.txn.put(at, key, db=order)
        if new is None:
            self.txn.delete(key, db=self.tables.page)
        else:
            self.txn.put(key, new.pack(), db=self.tables.page)


def stored_tenants(txn: Any, tables: Tables) -> Iterator[tuple[bytes, Total]]:
    """Yield the tenants that have pages, with their totals, as of the last `Writer.save`."""
    with txn.cursor(db=tables.total) as cursor:
        there = cursor.set_range(TENANT)
        while there and cursor.key()[:1] == TENANT and len(cursor.key()) == 9:
            yield bytes(cursor.key()[1:]), Total.unpack(cursor.value())
            there = cursor.next()


def oldest(cursor: Any, kind: bytes, tenant: bytes) -> tuple[int, bytes] | None:
    """Return tick and key of a tenant's least recently used page, of a `kind` of order; moves the cursor."""
    prefix = kind + tenant
    if not cursor.set_range(prefix) or cursor.key()[:9] != prefix:
        return None
    return tick_of(cursor.key()), bytes(cursor.value())


def file_pages(page: TierPage, page_bytes: int) -> int:
    """Return how many pages of the file a page takes, tables included; rather too many."""
    sizes = [len(page.header)]
    sizes += [sum(memoryview(b).nbytes for b in page.parts[part]) for part in PARTS if part in page.parts]
    whole = sum(-(-(size + 16) // page_bytes) if size > _INLINE else 1 for size in sizes)
    return whole + 4 + len(page.hints)
