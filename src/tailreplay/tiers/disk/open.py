"""Opening a disk tier's database: is it ours, and how large may it be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.disk.file import DATA
from tailreplay.tiers.disk.records import FORMAT, FORMAT_KEY, LIMIT_KEY, NAMES, Tables

_READERS = 512
# Sizes of maps are multiples of this, whatever the machine's page size.
_STEP = 2**16
# Evicting needs some room, also in a file that is to shrink.
_SLACK = 2**24


@dataclass(frozen=True, slots=True)
class Opened:
    """An open LMDB environment, its tables, and the bytes that the file may grow to."""

    env: Any
    tables: Tables
    limit: int


def library() -> Any:
    """Import LMDB.

    Raises
    ------
    CacheConfigError
        If it is not installed.
    """
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise CacheConfigError("The disk cache needs the package 'lmdb': pip install lmdb.") from error
    return lmdb


def connect(path: Path, limit: int | None) -> Opened:
    """Open or make the database in folder `path`.

    Parameters
    ----------
    limit : int or None
        Bytes of the file at most; None for what the database says. A file that is larger keeps its size.

    Raises
    ------
    CacheConfigError
        If it is another program's, or another release's.
    lmdb.Error
        If it is damaged.
    """
    file = path / DATA
    size = file.stat().st_size if file.exists() else 0
    wanted = limit if limit is None or size <= limit else size + _SLACK
    # A map of size 0 takes the size that the file was made with.
    env = library().open(
        str(path), map_size=_whole(wanted or 0), mode=0o600, create=False, max_dbs=len(NAMES), max_readers=_READERS,
        metasync=False,
    )  # fmt: skip
    try:
        env.reader_check()
        opened = _prepare(env, path, limit)
        if limit is None:
            env.set_mapsize(_whole(opened.limit))
    except BaseException:
        env.close()
        raise
    return opened


def _whole(size: int) -> int:
    return size - size % _STEP


def _prepare(env: Any, path: Path, limit: int | None) -> Opened:
    """Find or make the tables, and note the limit."""
    with env.begin(write=True) as txn:
        if txn.stat()["entries"]:
            _check_ours(env, txn, path)
        tables = Tables(*(env.open_db(name.encode(), txn=txn) for name in NAMES))
        stored = txn.get(LIMIT_KEY, db=tables.total)
        if stored is None and limit is None:
            raise CacheConfigError(f"There is no cache in '{path}'.")
        limit = limit or int(stored)
        if stored is None:
            txn.put(FORMAT_KEY, FORMAT, db=tables.total)
        if str(limit).encode() != stored:
            txn.put(LIMIT_KEY, str(limit).encode(), db=tables.total)
    return Opened(env, tables, limit)


def _check_ours(env: Any, txn: Any, path: Path) -> None:
    lmdb = library()
    try:
        found = txn.get(FORMAT_KEY, db=env.open_db(b"total", txn=txn, create=False))
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        found = None
    if found is None:
        raise CacheConfigError(f"'{path}' holds another program's database: name another folder.")
    if found != FORMAT:
        raise CacheConfigError(f"The cache in '{path}' is another release's: name another folder, or delete it.")
