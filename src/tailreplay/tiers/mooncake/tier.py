"""Pages in a Mooncake Store: memory that the processes of several machines lend each other, over TCP or RDMA.

A page is up to three objects, its header and its parts; a hint is a small one. Mooncake evicts each by itself when it was
last used long ago, and loses what a process has lent when that process ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailreplay.errors import CacheConfigError
from tailreplay.sizes import format_bytes, parse_bytes
from tailreplay.tiers.base import PARTS, Found, TierError, TierFullError, TierPage, Usage
from tailreplay.tiers.batches import Changes, by_bytes, changes, contiguous, replacement
from tailreplay.tiers.mooncake.client import BEING_WRITTEN, NOT_FOUND, MooncakeClient

PROTOCOLS = ("tcp", "rdma")
LEAST_LENT = 16 << 20


class MooncakeTier:
    """A tier on a Mooncake Store.

    A look-up counts as a use, and so does a read: it leases the objects, which are not evicted while leased (the master's
    ``--default_kv_lease_ttl``, 10 s). What is removed is removed in spite of a lease: whoever reads it then may get a part
    that its checksum does not fit.

    Parameters
    ----------
    master : str
        ``HOST:PORT`` of `mooncake_master`.
    lend : int or str
        Memory that this process lends to the store, like "1GiB", 16 MiB at least; "0" for none. What is in it ends with
        the process.
    buffer : int or str
        Memory that values pass through. No part may be larger.
    protocol : str
        "tcp" or "rdma".
    device : str
        RDMA devices, separated by commas.
    host : str or None
        Address that the other processes reach this one by.
    prefix : str
        In front of every name.
    timeout : float
        Seconds for an answer of the master.

    Raises
    ------
    CacheConfigError
        If the package is missing or a value is wrong; one sentence.
    """

    name = "mooncake"

    def __init__(
        self,
        master: str,
        lend: int | str = 0,
        buffer: int | str = "64MiB",
        protocol: str = "tcp",
        device: str = "",
        host: str | None = None,
        prefix: str = "tailreplay",
        timeout: float = 1.0,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise CacheConfigError(f"Mooncake's protocol is 'tcp' or 'rdma', not '{protocol}'.")
        if not master.rpartition(":")[0] or not master.rpartition(":")[2].isdigit():
            raise CacheConfigError(f"Mooncake's master is named HOST:PORT, got '{master}'.")
        self._buffer_bytes = parse_bytes(buffer)
        self._lend_bytes = 0 if str(lend).strip() == "0" else parse_bytes(lend)
        if 0 < self._lend_bytes < LEAST_LENT:
            raise CacheConfigError(f"Mooncake lends {format_bytes(LEAST_LENT)} at least, or nothing: lend=0.")
        self._prefix = prefix
        self._largest: dict[str, int] = {}
        self._client = MooncakeClient(master, self._lend_bytes, self._buffer_bytes, protocol, device, host, timeout)

    def __repr__(self) -> str:
        return f"MooncakeTier({self._client.master}, lends {format_bytes(self._lend_bytes)})"

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        """See `Tier`; two round trips, one if none is there. Marks them as used."""
        there, _ = self._there(keys)
        headers = iter(
            self._values([self._header(key) for key, parts in zip(keys, there, strict=True) if parts is not None])
        )
        found = [None if parts is None else (next(headers), parts) for parts in there]
        return [None if entry is None or entry[0] is None else Found(entry[0], entry[1]) for entry in found]

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        """See `Tier`."""
        return self._values([self._hint(hint) for hint in hints])

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """See `Tier`. As many at a time as fit into half of the buffer; views are of the buffer itself."""
        at, stuck = 0, False
        while at < len(keys):
            most = max(1, self._buffer_bytes // 2 // self._largest.get(part, self._buffer_bytes // 8))
            names = [self._part(key, part) for key in keys[at : at + (1 if stuck else most)]]
            handles, lost = self._fetch(names)
            for i in range(len(handles)):
                if i in lost:
                    break
                handle, handles[i] = handles[i], None
                stuck = False
                at += 1
                yield None if handle is None else self._view(handle, part)
                del handle
            if lost and min(lost) == 0:
                if stuck:
                    raise TierError(
                        f"Mooncake at {self._client.master} has a page that cannot be read: the process that lends its "
                        f"memory is gone, or it is larger than the buffer of {format_bytes(self._buffer_bytes)}."
                    )
                stuck = True

    def put(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`. A header is written after its parts; one without is no page."""
        for batch in by_bytes(pages, self._buffer_bytes // 2):
            self._put(batch)

    def replace(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`. Objects cannot be changed, so the old ones go first: for a moment the page is not there."""
        for batch in by_bytes(pages, self._buffer_bytes // 2):
            hints = {hint: page.key for page in batch for hint in page.hints}
            self._write(Changes({page.key: replacement(page) for page in batch}, hints))

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        """See `Tier`."""
        if part is None:
            self._remove([self._header(key) for key in keys])
        self._remove([self._part(key, name) for key in keys for name in (PARTS if part is None else (part,))])

    def usage(self) -> Usage:
        """See `Tier`. Mooncake's clients are not told; the master's metrics port knows."""
        return Usage(None, None, None)

    def close(self) -> None:
        """See `Tier`. Takes up to five seconds, in which no other thread of the process runs; do it last."""
        self._client.close()

    def _put(self, pages: Sequence[TierPage]) -> None:
        there, hints = self._there([page.key for page in pages], [hint for page in pages for hint in page.hints])
        partial = [
            page.key
            for page, parts in zip(pages, there, strict=True)
            if parts is not None and not parts.issuperset(page.parts)
        ]
        headers = dict(zip(partial, self._values([self._header(key) for key in partial]), strict=True))
        found: list[Found | None] = []
        for page, parts in zip(pages, there, strict=True):
            header = headers.get(page.key, b"")
            found.append(None if parts is None or header is None else Found(header, parts))
        self._write(changes(pages, found, hints))

    def _write(self, todo: Changes) -> None:
        """Write parts, then headers, then hints; what is there goes first, since no object can be changed."""
        parts = {
            self._part(key, part): contiguous(buffers)
            for key, change in todo.pages.items()
            for part, buffers in change.parts.items()
        }
        for value in parts.values():
            if memoryview(value).nbytes > self._buffer_bytes:
                raise TierFullError(
                    f"A part of {format_bytes(memoryview(value).nbytes)} does not fit into Mooncake's buffer of "
                    f"{format_bytes(self._buffer_bytes)}: raise it (buffer=…)."
                )
        gone = [self._part(key, part) for key, change in todo.pages.items() for part in change.drop]
        # The header of a page that only gets what it lacks stays until that is stored: it may not find room.
        anew = [key for key, change in todo.pages.items() if change.drop.union(change.parts).issuperset(PARTS)]
        self._remove([*map(self._header, anew), *parts, *gone])
        with self._undone(list(parts)):
            self._store(parts)
        headers = {self._header(key): change.header for key, change in todo.pages.items()}
        with self._undone([*headers, *(self._part(key, part) for key in todo.pages for part in PARTS)]):
            self._remove([name for key, name in zip(todo.pages, headers, strict=True) if key not in anew])
            self._store(headers)
        names = {self._hint(hint): key for hint, key in todo.hints.items()}
        self._remove(list(names))
        self._store(names)

    def _store(self, objects: Mapping[str, Any]) -> None:
        if objects:
            code = self._client.call("put_batch", list(objects), list(objects.values()))
            self._client.check(code, "storing pages")

    @contextlib.contextmanager
    def _undone(self, names: Sequence[str]) -> Iterator[None]:
        """If the block fails, remove what it may have stored: it is no page, and only takes room."""
        try:
            yield
        except TierError:
            with contextlib.suppress(TierError):
                self._remove(names)
            raise

    def _there(
        self, keys: Sequence[bytes], hints: Sequence[bytes] = ()
    ) -> tuple[list[frozenset[str] | None], set[bytes]]:
        """Return for each key the parts that are there, None if its header is not; and the hints that are there."""
        names = [name for key in keys for name in (self._header(key), *(self._part(key, part) for part in PARTS))]
        codes = iter(self._exist(names + [self._hint(hint) for hint in hints]))
        found: list[frozenset[str] | None] = []
        for _ in keys:
            header = next(codes)
            parts = frozenset([part for part in PARTS if next(codes)])
            found.append(parts if header else None)
        return found, {hint for hint in hints if next(codes)}

    def _exist(self, names: Sequence[str]) -> list[bool]:
        codes = self._client.call("batch_is_exist", list(names)) if names else []
        for code in codes:
            self._client.check(code, "looking pages up")
        return [code == 1 for code in codes]

    def _fetch(self, names: Sequence[str]) -> tuple[list[Any], set[int]]:
        """Return buffers, None where there is none; and the places of those that are there and could not be read."""
        # Asked for one object twice, the library answers the second with another's bytes.
        once = list(dict.fromkeys(names))
        got = dict(zip(once, self._client.call("batch_get_buffer", once), strict=True))
        handles: list[Any] = [got[name] for name in names]
        empty = [i for i, handle in enumerate(handles) if handle is None]
        if not empty:
            return handles, set()
        # The library does not tell a miss from a failure.
        exist = self._exist([names[i] for i in empty])
        return handles, {i for i, there in zip(empty, exist, strict=True) if there}

    def _values(self, names: Sequence[str]) -> list[bytes | None]:
        """Return small objects."""
        if not names:
            return []
        handles, lost = self._fetch(names)
        for i in lost:
            # A lease that ended on the way, or a full buffer: neither says that it is gone.
            handles[i] = self._client.call("batch_get_buffer", [names[i]])[0]
        return [None if handle is None else bytes(memoryview(handle)) for handle in handles]

    def _view(self, handle: Any, part: str) -> memoryview:
        view = memoryview(handle).toreadonly().cast("B")
        self._largest[part] = max(self._largest.get(part, 1), view.nbytes)
        return view

    def _remove(self, names: Sequence[str]) -> None:
        if not names:
            return
        for code in self._client.call("batch_remove", list(names), True):
            # What another process writes at this moment counts as written afterwards.
            self._client.check(code, "removing pages", ignore=(NOT_FOUND, BEING_WRITTEN))

    def _header(self, key: bytes) -> str:
        return f"{self._prefix}/page/{key.hex()}"

    def _part(self, key: bytes, part: str) -> str:
        return f"{self._header(key)}/{part}"

    def _hint(self, hint: bytes) -> str:
        return f"{self._prefix}/hint/{hint.hex()}"
