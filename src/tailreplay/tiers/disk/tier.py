"""Pages on a local disk, in an LMDB database: they outlast the process, and are read without being copied.

The file never grows beyond the limit, which is the size of LMDB's map. Least recently used pages make room before it
is reached; a share of it stays free, since LMDB never writes over what a reader may see and needs neighbouring free
pages for a part. Several processes may use a folder on a local file system at once; a network file system will not do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.base import Found, TierError, TierPage, Usage
from tailreplay.tiers.disk.entries import Entry, entries
from tailreplay.tiers.disk.env import DiskEnv
from tailreplay.tiers.disk.eviction import Quotas
from tailreplay.tiers.disk.file import default_path
from tailreplay.tiers.disk.put import Putter
from tailreplay.tiers.disk.records import ALL_KEY, Record, Total
from tailreplay.tiers.disk.shared import close_env, fork_lock, open_env, reopen_env
from tailreplay.tiers.disk.touches import BATCH as TOUCHES
from tailreplay.tiers.disk.touches import Touches
from tailreplay.tiers.disk.writer import Writer, stored_tenants

__all__ = ["DiskTier", "default_path"]

_DROPS = 256


class DiskTier:
    """A store of pages in a folder.

    Parameters
    ----------
    path : str or Path
        The folder; made if missing, readable by its owner only.
    limit_bytes : int or None
        Size that the file never exceeds, 1 MiB at least. None for the limit the folder was last opened with, which must
        exist then. With less than before, pages are evicted and the file is written anew, if no other process uses it.
    reserved : mapping
        Tenant -> bytes that pages of other tenants never push it below; three quarters of the limit together at most.
    limits : mapping
        Tenant -> bytes that it may hold: beyond them it evicts its own pages.
    hidden_first : bool
        Drop hiddens of all pages, least recently used first, before any page as a whole.

    Raises
    ------
    CacheConfigError
        If the folder or a limit cannot be used, or LMDB is not installed.
    """

    name = "disk"

    def __init__(
        self,
        path: str | Path,
        limit_bytes: int | None = None,
        reserved: Mapping[bytes, int] | None = None,
        limits: Mapping[bytes, int] | None = None,
        hidden_first: bool = False,
    ) -> None:
        self._quotas = Quotas(dict(reserved or {}), dict(limits or {}), hidden_first)
        self._lock = threading.Lock()
        self._touches = Touches()
        self._putter = Putter(self._quotas, self._touches)
        self._closed = False
        self._opened = open_env(Path(path), limit_bytes)
        try:
            if sum(self._quotas.reserved.values()) > self.limit * 3 // 4:
                raise CacheConfigError(
                    "More than three quarters of the disk cache is reserved for tenants: reserve less."
                )
            self._putter.fit(self._opened)
        except BaseException:
            close_env(self._opened)
            raise

    @property
    def path(self) -> Path:
        """The folder."""
        return self._opened.path

    @property
    def limit(self) -> int:
        """Bytes that the file may grow to."""
        return self._opened.limit

    @property
    def file_bytes(self) -> int:
        """Length of the file now, of which parts may take no room on the disk."""
        return self._env.file_bytes

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        """Say for each key what is there. Marks nothing as used."""
        answer: list[Found | None] = []
        with self._env.read() as txn:
            tables = self._opened.tables
            for key in keys:
                record = txn.get(key, db=tables.page)
                header = txn.get(key, db=tables.header)
                there = record is not None and header is not None
                answer.append(Found(bytes(header), Record.unpack(record).parts) if there else None)
        return answer

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        """Return for each hint the key of the page that was last put with it."""
        with self._env.read() as txn:
            keys = [txn.get(hint, db=self._opened.tables.hint) for hint in hints]
            return [None if key is None else bytes(key) for key in keys]

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """Yield views of the file, valid until the next is asked for. The pages are marked as used a while later."""
        found = []
        try:
            for key, view in zip(keys, self.peek(keys, part), strict=True):
                if view is not None:
                    found.append(key)
                yield view
        finally:
            self._touches.add(found)
            if len(self._touches) >= TOUCHES:
                # Which pages were used is not worth an error.
                with suppress(TierError):
                    self.flush()

    def peek(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """Yield what `get` does, and mark nothing as used."""
        with self._env.read() as txn:
            table = self._opened.tables.part(part)
            for key in keys:
                view = txn.get(key, db=table)
                yield view
                # An error is better than the bytes of another page, but what was made of the view may still be there.
                with suppress(BufferError):
                    if view is not None:
                        view.release()

    def put(self, pages: Sequence[TierPage]) -> None:
        """Store pages in transactions of up to 64 MiB, evicting others.

        Raises
        ------
        TierError
            If a page is larger than the limit, or its tenant's, or all that could make room is reserved for others. The
            pages before and after one that is too large are stored.
        """
        self._putter.put(self._env, pages, over=False)

    def replace(self, pages: Sequence[TierPage]) -> None:
        """Store pages over what is there; raises as `put`."""
        self._putter.put(self._env, pages, over=True)

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        """Remove pages, or one part of them. The file keeps its length (see `compact`)."""
        for at in range(0, len(keys), _DROPS):
            with self._env.write(_DROPS) as txn:
                writer = Writer(txn, self._opened.tables)
                for key in keys[at : at + _DROPS]:
                    record = writer.record(key)
                    if record is not None and part is None:
                        writer.remove(key, record)
                    elif record is not None and part is not None:
                        writer.remove_part(key, record, part)
                writer.save()

    def usage(self) -> Usage:
        """Return bytes of headers and parts, without what the file needs around them."""
        with self._env.read() as txn:
            total = Total.unpack(txn.get(ALL_KEY, db=self._opened.tables.total))
            tenants = {name: each.nbytes for name, each in stored_tenants(txn, self._opened.tables)}
        return Usage(total.nbytes, self.limit, total.pages, total.evictions, tenants)

    def close(self) -> None:
        """Write what was used since, and let go of the file as soon as nobody reads it."""
        with self._lock:
            if self._closed:
                return
        with suppress(TierError):
            self.flush()
        with self._lock:
            if not self._closed:
                self._closed = True
                close_env(self._opened)

    def flush(self) -> None:
        """Write which pages were used since the last time; raises `TierError`."""
        if len(self._touches):
            with self._env.write(TOUCHES) as txn:
                writer = Writer(txn, self._opened.tables)
                self._touches.write(writer)
                writer.save()

    def headers(self, oldest_first: bool = False) -> Iterator[tuple[bytes, bytes, frozenset[str]]]:
        """Yield key, header and parts of every page, in key order or least recently used first."""
        return ((entry.key, entry.header, entry.parts) for entry in self.entries(oldest_first))

    def entries(self, oldest_first: bool = False) -> Iterator[Entry]:
        """Yield all that is known of every page; one that is put or removed meanwhile may be there or not."""
        return entries(self._env, oldest_first)

    def prune(
        self, to_bytes: int = 0, used_before: float | None = None, where: Callable[[Entry], bool] | None = None
    ) -> tuple[int, int]:
        """Remove pages, least recently used first.

        Parameters
        ----------
        to_bytes : int
            Stop when the tier holds no more than that.
        used_before : float or None
            Only pages that were last used before, in seconds since the epoch.
        where : callable or None
            Only pages of which it says True.

        Returns
        -------
        tuple of int
            Pages and bytes that were removed.
        """
        self.flush()
        left = self.usage().bytes_used or 0
        chosen, freed = [], 0
        for entry in self.entries(oldest_first=True):
            if left - freed <= to_bytes or (used_before is not None and entry.used >= used_before):
                break
            if where is None or where(entry):
                chosen.append(entry.key)
                freed += entry.nbytes
        self.drop(chosen)
        return len(chosen), freed

    def compact(self) -> bool:
        """Give the room of removed pages back to the disk; False, and nothing is done, while others use the folder.

        Needs room for a second file meanwhile.
        """
        return self._env.compact()

    @property
    def _env(self) -> DiskEnv:
        if self._closed:
            raise TierError("The disk cache is closed.")
        if self._opened.pid != os.getpid():
            with fork_lock():
                if self._opened.pid != os.getpid():
                    self._lock = threading.Lock()
                    self._touches.forget()
                    self._opened = reopen_env(self._opened)
        return self._opened
