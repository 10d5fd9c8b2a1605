"""Which pages of a disk tier make room: the least recently used of tenants that hold more than is reserved for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tailreplay.tiers.base import HIDDEN
from tailreplay.tiers.disk.records import ABSENT, HIDDEN_ORDER, PAGE_ORDER, Record
from tailreplay.tiers.disk.writer import Writer, oldest


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes by tenant, and what goes first.

    Attributes
    ----------
    reserved : mapping
        Tenant -> bytes that other tenants' pages never push it below.
    limits : mapping
        Tenant -> bytes that it may hold.
    hidden_first : bool
        Drop hiddens of all pages, least recently used first, before any page as a whole.
    """

    reserved: Mapping[bytes, int] = field(default_factory=dict)
    limits: Mapping[bytes, int] = field(default_factory=dict)
    hidden_first: bool = False

    @property
    def kinds(self) -> tuple[bytes, ...]:
        """Orders in which victims are looked for."""
        return (HIDDEN_ORDER, PAGE_ORDER) if self.hidden_first else (PAGE_ORDER,)


class Evictor:
    """Evictions inside one write transaction.

    Parameters
    ----------
    writer : Writer
    quotas : Quotas
    keep : collection of bytes
        Keys that are never evicted: those being put.

    Attributes
    ----------
    blocked : bool
        Whether what is reserved for other tenants was in the way.
    """

    def __init__(self, writer: Writer, quotas: Quotas, keep: Collection[bytes] = ()) -> None:
        self._writer, self._quotas, self._keep = writer, quotas, keep
        # (rank of kind, tick, tenant, key): each tenant's oldest of each kind. Entries may be stale.
        self._heap: list[tuple[int, int, bytes, bytes]] | None = None
        self.blocked = False

    def make_room(self, enough: Callable[[], bool], tenant: bytes | None) -> bool:
        """Evict until `enough()`; False if what may be evicted for `tenant` is not enough.

        Parameters
        ----------
        tenant : bytes or None
            For whom: its own pages may go even if it holds less than is reserved for it. None for nobody, all may go.
        """
        if enough():
            return True
        if self._heap is None:
            self._heap = []
            for name in self._writer.tenants():
                self._push(name)
        protected = []
        while self._heap and not enough():
            entry = heapq.heappop(self._heap)
            rank, tick, owner, key = entry
            record = self._writer.record(key)
            if record is None or record.tick != tick or (self._hidden_only(rank) and record.hidden == ABSENT):
                self._push(owner, rank)
            elif key in self._keep:
                continue  # Later ones of this tenant are being put too.
            elif self._protected(record, rank, tenant):
                protected.append(entry)
            else:
                self._evict(key, record, rank)
                self._push(owner, rank)
        self.blocked = bool(protected)
        for entry in protected:
            heapq.heappush(self._heap, entry)
        return enough()

    def cut_to_limit(self, tenant: bytes) -> None:
        """Evict pages of a tenant until it holds no more than its limit."""
        limit = self._quotas.limits.get(tenant)
        if limit is None:
            return
        with self._writer.txn.cursor(db=self._writer.tables.order) as cursor:
            for rank, kind in enumerate(self._quotas.kinds):
                while self._writer.tenant(tenant).nbytes > limit:
                    first = oldest(cursor, kind, tenant)
                    record = self._writer.record(first[1]) if first else None
                    if first is None or record is None:
                        break
                    self._evict(first[1], record, rank)

    def _push(self, tenant: bytes, only: int | None = None) -> None:
        assert self._heap is not None
        with self._writer.txn.cursor(db=self._writer.tables.order) as cursor:
            for rank, kind in enumerate(self._quotas.kinds):
                first = oldest(cursor, kind, tenant) if only in (None, rank) else None
                if first is not None:
                    heapq.heappush(self._heap, (rank, first[0], tenant, first[1]))

    def _protected(self, record: Record, rank: int, tenant: bytes | None) -> bool:
        if tenant is None or record.tenant == tenant:
            return False
        held = self._writer.tenant(record.tenant).nbytes
        return held - self._freed(record, rank) < self._quotas.reserved.get(record.tenant, 0)

    def _freed(self, record: Record, rank: int) -> int:
        return record.hidden if self._hidden_only(rank) else record.nbytes

    def _hidden_only(self, rank: int) -> bool:
        return self._quotas.kinds[rank] == HIDDEN_ORDER

    def _evict(self, key: bytes, record: Record, rank: int) -> None:
        if self._hidden_only(rank):
            self._writer.remove_part(key, record, HIDDEN)
        else:
            self._writer.remove(key, record)
        self._writer.all.evictions += 1
