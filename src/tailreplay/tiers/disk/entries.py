"""All pages of a disk tier, one after another, without keeping a snapshot of the file for long."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tailreplay.tiers.disk.env import DiskEnv
from tailreplay.tiers.disk.records import PAGE_ORDER, Record, Tables, tick_of
from tailreplay.tiers.disk.writer import stored_tenants

# A reader that stays keeps removed pages from being used again.
_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a page.

    Attributes
    ----------
    key, header, tenant : bytes
    parts : frozenset of str
    used : float
        Last use, in seconds since the epoch; reads are written down a while later.
    nbytes : int
        Header and parts.
    sizes : dict
        Part -> bytes.
    hints : tuple of bytes
    """

    key: bytes
    header: bytes
    tenant: bytes
    parts: frozenset[str]
    used: float
    nbytes: int
    sizes: dict[str, int]
    hints: tuple[bytes, ...]


def entries(env: DiskEnv, oldest_first: bool) -> Iterator[Entry]:
    """Yield every page, in key order or least recently used first."""
    chunks = _chunks(_oldest_first(env)) if oldest_first else _in_key_order(env)
    for keys in chunks:
        with env.read() as txn:
            found = [_entry(txn, env.tables, key) for key in keys]
        yield from (entry for entry in found if entry is not None)


def _entry(txn: Any, tables: Tables, key: bytes) -> Entry | None:
    data, header = txn.get(key, db=tables.page), txn.get(key, db=tables.header)
    if data is None or header is None:
        return None
    record = Record.unpack(data)
    sizes = {part: getattr(record, part) for part in sorted(record.parts)}
    return Entry(
        key, bytes(header), record.tenant, record.parts, record.tick / 1e9, record.nbytes, sizes, record.hints
    )  # fmt: skip


def _in_key_order(env: DiskEnv) -> Iterator[list[bytes]]:
    after = b"\0"
    while True:
        keys: list[bytes] = []
        with env.read() as txn, txn.cursor(db=env.tables.page) as cursor:
            there = cursor.set_range(after)
            while there and len(keys) < _AT_ONCE:
                keys.append(bytes(cursor.key()))
                there = cursor.next()
        if not keys:
            return
        yield keys
        after = keys[-1] + b"\0"


def _oldest_first(env: DiskEnv) -> list[bytes]:
    with env.read() as txn:
        tenants = [name for name, _ in stored_tenants(txn, env.tables)]
        orders = [_order(txn, env.tables, PAGE_ORDER + name) for name in tenants]
        return [key for _, key in heapq.merge(*orders)]


def _order(txn: Any, tables: Tables, prefix: bytes) -> Iterator[tuple[int, bytes]]:
    with txn.cursor(db=tables.order) as cursor:
        there = cursor.set_range(prefix)
        while there and cursor.key()[:9] == prefix:
            yield tick_of(cursor.key()), bytes(cursor.value())
            there = cursor.next()


def _chunks(keys: list[bytes]) -> Iterator[list[bytes]]:
    return (keys[at : at + _AT_ONCE] for at in range(0, len(keys), _AT_ONCE))
