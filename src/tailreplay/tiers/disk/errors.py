"""LMDB's errors, as those that a tier may raise."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, getrlimit

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.base import TierError, TierFullError
from tailreplay.tiers.disk.file import suspect
from tailreplay.tiers.disk.open import library

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 2**26


class NoSpaceError(TierFullError):
    """The file has reached its limit, or the disk is full; evicting makes room."""


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn errors about the database in folder `path` into `TierError`."""
    lmdb = library()
    try:
        yield
    except lmdb.MapFullError as error:
        raise NoSpaceError(f"The disk cache in '{path}' is full.") from error
    except lmdb.Error as error:
        if _is_full(getattr(error, "code", 0), path):
            raise NoSpaceError(f"The disk of '{path}' is full.") from error
        # Of a damaged page that says where a table begins, LMDB tells only that the transaction is of no use any more. No
        # transaction is used after an error, so a bad one has just met the damage.
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.BadTxnError):
            suspect(path)
        raise TierError(f"The disk cache in '{path}' failed: {error}.") from error
    except CacheConfigError as error:
        raise TierError(str(error)) from error
    except OSError as error:
        raise TierError(f"The disk cache in '{path}' failed: {error.strerror}.") from error


def _is_full(code: int, path: Path) -> bool:
    if code != errno.EIO:
        return code in _FULL
    # LMDB's word for a write that got only a part onto the disk, and for a disk that fails.
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _LITTLE or getrlimit(RLIMIT_FSIZE)[0] != RLIM_INFINITY
