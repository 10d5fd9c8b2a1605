"""The open database of a disk tier's folder: one a process, shared by every tier on that folder.

Commits write a transaction's pages through to the disk before the few bytes that make them count, which follow on the
system's own time. So a killed process loses nothing that was committed; a power loss may take the last transactions,
and never leaves a half of one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tailreplay.errors import CacheConfigError
from tailreplay.sizes import format_bytes
from tailreplay.tiers.base import TierError
from tailreplay.tiers.disk.errors import told
from tailreplay.tiers.disk.file import DATA, Users, damage, make_folder, move_aside
from tailreplay.tiers.disk.open import connect, library
from tailreplay.tiers.disk.records import NAMES

log = logging.getLogger("tailreplay")

MIN_LIMIT = 2**20
# The file grows ahead of what is written, without taking room, so that one that is shorter than its content was cut.
_AHEAD, _AHEAD_RECORD = 2**20, 2**15


class DiskEnv:
    """An open database.

    Parameters
    ----------
    path : Path
        The folder; made if missing.
    limit : int or None
        Bytes that the file may grow to; None for the limit it was last opened with.

    Attributes
    ----------
    tables : Tables
    limit, page_bytes : int
        Bytes of the file at most, and of one of its pages.
    pid : int
        Process that opened it.

    Raises
    ------
    CacheConfigError
        If the folder cannot be used; one sentence.
    """

    def __init__(self, path: Path, limit: int | None) -> None:
        self._lmdb = library()
        self._env: Any = None
        if limit is not None and limit < MIN_LIMIT:
            raise CacheConfigError(f"A disk cache of {limit} bytes is too small: give it {format_bytes(MIN_LIMIT)}.")
        if limit is None and not (path / DATA).exists():
            raise CacheConfigError(f"There is no cache in '{path}'.")
        make_folder(path)
        self.path, self.pid = path, os.getpid()
        self._asked = limit
        self._data = f"The cache file '{path / DATA}'"
        self._lock = threading.Lock()
        self._users = Users(path)
        self._owners, self._active, self._closed, self._stale = 1, 0, False, False
        try:
            self._open()
        except BaseException:
            self._users.leave()
            raise

    def _open(self) -> None:
        """Open the file; one that is damaged is moved aside first, if nobody else has it open."""
        for attempt in (0, 1):
            with self._users.alone() as alone:
                reason = damage(self.path) if alone else None
                if reason is not None:
                    self._replace(reason)
            self._users.join()
            try:
                self._connect()
                return
            except (self._lmdb.InvalidError, self._lmdb.CorruptedError, self._lmdb.PageNotFoundError) as error:
                with self._users.alone() as alone:
                    if attempt or not alone:
                        raise CacheConfigError(f"{self._data} is damaged and in use: stop what uses it.") from error
                    self._replace(str(error))
            except self._lmdb.Error as error:
                raise CacheConfigError(f"{self._data} cannot be opened: {error}.") from error
            except OSError as error:
                raise CacheConfigError(f"{self._data} cannot be opened: {error.strerror}.") from error
            except OverflowError as error:
                raise CacheConfigError("The limit of the disk cache is more than this machine can address.") from error

    def _replace(self, reason: str) -> None:
        if self._asked is None:
            # Whoever only looks moves nothing.
            raise CacheConfigError(f"{self._data} is damaged ({reason}): a server that opens it starts an empty one.")
        move_aside(self.path, reason)

    def _connect(self) -> None:
        opened = connect(self.path, self._asked)
        self._env, self.tables, self.limit = opened.env, opened.tables, opened.limit
        self.page_bytes: int = self._env.stat()["psize"]
        self._file = os.open(self.path / DATA, os.O_RDWR | os.O_CLOEXEC)
        self._stale = False

    @contextmanager
    def read(self) -> Iterator[Any]:
        """Give a read transaction whose values are views of the file.

        Raises
        ------
        TierError
            If the database is closed or cannot be read.
        """
        txn = self._begin(write=False)
        try:
            with self._told():
                yield txn
        finally:
            txn.abort()
            self._leave()

    @contextmanager
    def write(self, records: int = 1, nbytes: int = 0) -> Iterator[Any]:
        """Give the write transaction; committed at the end, aborted if anything is raised. Waits for other writers.

        Parameters
        ----------
        records, nbytes : int
            Pages that will be touched at most, and bytes of new parts.

        Raises
        ------
        NoSpaceError
            If the file or the disk is full.
        TierError
            As `read`.
        """
        txn = self._begin(write=True)
        try:
            with self._told():
                try:
                    self._grow(records * _AHEAD_RECORD + nbytes)
                    yield txn
                except BaseException:
                    txn.abort()
                    raise
                txn.commit()
        finally:
            self._leave()

    def _begin(self, write: bool) -> Any:
        for attempt in (0, 1):
            with self._told():
                self._enter()
                try:
                    return self._env.begin(write=write, buffers=True)
                except self._lmdb.MapResizedError:
                    # Another process has opened the folder with a larger limit, which is everyone's now.
                    self._leave()
                    self._asked, self._stale = None, True
                    if attempt:
                        raise
                except self._lmdb.ReadersFullError:
                    cleared = self._env.reader_check()
                    self._leave()
                    if attempt or not cleared:
                        raise
                except BaseException:
                    self._leave()
                    raise
        raise AssertionError("unreachable")

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise TierError("The disk cache is closed.")
            if self._stale and not self._active:
                self._disconnect()
                self._open()
            self._active += 1

    def _leave(self) -> None:
        with self._lock:
            self._active -= 1
            if self._closed and not self._active:
                self._shut()

    @contextmanager
    def _told(self) -> Iterator[None]:
        with told(self.path):
            try:
                yield
            except self._lmdb.PanicError:
                # After a failed write of the file's first pages the library refuses everything until it is opened anew.
                self._stale = True
                raise

    def _grow(self, nbytes: int) -> None:
        # Inside the write transaction: no other process moves the end of the file meanwhile.
        info = self._env.info()
        size = min((info["last_pgno"] + 1) * self.page_bytes + _AHEAD + nbytes, info["map_size"])
        with suppress(OSError):  # A full disk shows when the pages are written.
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)

    def live_pages(self, txn: Any) -> int:
        """Return how many pages of the file hold something."""
        stats = [txn.stat(), *(txn.stat(getattr(self.tables, name)) for name in NAMES)]
        return sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    def check_readers(self) -> None:
        """Forget readers whose process has ended: they keep removed pages from being used again."""
        self._env.reader_check()

    @property
    def file_bytes(self) -> int:
        """Length of the file. Parts of it may take no room on the disk."""
        return os.fstat(self._file).st_size

    def compact(self) -> bool:
        """Write the file anew without its free pages; False, and nothing is done, while others use it.

        Raises
        ------
        TierError
            If the disk has no room for a second file.
        """
        with self._lock, self._told():
            if self._owners > 1 or self._active or self._closed:
                return False
            with self._users.alone() as alone:
                if alone:
                    self._rewrite()
            self._users.join()
            if alone:
                self._open()
            return alone

    def _rewrite(self) -> None:
        new = self.path / (DATA + ".new")
        new.unlink(missing_ok=True)
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._env.copyfd(file, compact=True)
            os.fsync(file)
        except BaseException:
            new.unlink()
            raise
        finally:
            os.close(file)
        self._disconnect()
        os.replace(new, self.path / DATA)

    def share(self) -> None:
        """Count one more owner."""
        self._owners += 1

    def release(self) -> bool:
        """Count one owner less; True if it was the last: then the file is let go of when running transactions end."""
        with self._lock:
            self._owners -= 1
            if self._owners or self._closed:
                return False
            self._closed = True
            if not self._active:
                self._shut()
            return True

    def _disconnect(self) -> None:
        if self._env is not None:
            os.close(self._file)
            self._env.close()
            # Whatever fails before it is open again: the next call opens it.
            self._env, self._stale = None, True

    def _shut(self) -> None:
        self._disconnect()
        self._users.leave()

    def abandon(self) -> None:
        """In a child process: let go of what was inherited.

        Raises
        ------
        TierError
            If the parent was in the middle of something: closing would wait for a thread that is not there.
        """
        if self._active:
            raise TierError("The process was forked while its disk cache was in use: open the cache after the fork.")
        self._shut()
