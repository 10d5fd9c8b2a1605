"""The folder of a disk tier, as files: who may read them, who uses them, and whether the data file is whole.

LMDB trusts its file: a truncated one ends the process with SIGBUS. So the file is looked at before LMDB gets it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailreplay.errors import CacheConfigError
from tailreplay.sizes import format_bytes

log = logging.getLogger("tailreplay")

DATA, DAMAGED, SUSPECT, USERS = "data.mdb", "data.mdb.damaged", "data.mdb.suspect", "users.lock"
# Of LMDB 0.9's two meta pages, in the machine's byte order: magic, version, and after 136 bytes the last page number
# and the number of the transaction. Each begins 16 bytes into a file page; the page size is the first database's pad.
_HEAD = struct.Struct("=II")
_SIZE = struct.Struct("=I")
_TAIL = struct.Struct("=QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_HEADER, _SIZE_AT, _TAIL_AT = 16, 24, 120


def default_path() -> Path:
    """Return the folder of the cache if none is named: ``$XDG_CACHE_HOME/tailreplay``, or ``~/.cache/tailreplay``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tailreplay"


def folder_at(text: str | Path) -> Path:
    """Return the folder that a person named; ``~`` is a home.

    Raises
    ------
    CacheConfigError
        If no folder can have that name.
    """
    if "\0" in str(text):
        raise CacheConfigError(f"No cache folder can be named {str(text)!r}.")
    try:
        path = Path(text).expanduser()
        (path / DATA).exists()
    except RuntimeError as error:
        raise CacheConfigError(f"The cache folder '{text}' is below the home of a user who has none.") from error
    except OSError as error:
        raise CacheConfigError(f"The cache folder '{text}' cannot be used: {error.strerror}.") from error
    return path


def make_folder(path: Path) -> None:
    """Create the folder, for its owner only, and check that files can be made in it.

    Raises
    ------
    CacheConfigError
        If it is a file, or cannot be made or written.
    """
    try:
        # Prompts can be guessed from their pages.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CacheConfigError(f"The cache folder '{path}' is a file, or lies below one: name a folder.") from error
    except OSError as error:
        raise CacheConfigError(f"The cache folder '{path}' cannot be made: {error.strerror}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise CacheConfigError(f"The cache folder '{path}' cannot be written: name one that is yours.")


class Users:
    """A lock that every process holds while it has the folder open, so that one can tell that it is alone.

    Parameters
    ----------
    path : Path
        The folder.

    Raises
    ------
    CacheConfigError
        If the lock file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CacheConfigError(f"The cache folder '{path}' cannot be used: {error.strerror}.") from error

    def join(self) -> None:
        """Be one of those who use the folder; waits for whoever is `alone` in it."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Keep others out for a while; False where there are others. Nobody has the data file open inside."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Let go of the lock."""
        os.close(self._file)


def damage(path: Path) -> str | None:
    """Say what is wrong with the data file in folder `path` as far as its first pages tell; None if nothing is.

    Reads a few bytes.
    """
    file = path / DATA
    if (path / SUSPECT).exists():
        return "its tables were found damaged while it was used"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(4096)
            if not first:
                return None
            page_size = _page_size(first)
            if page_size is None:
                return "it is no LMDB file"
            stream.seek(page_size)
            second = stream.read(4096)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheConfigError(f"The cache file '{file}' cannot be read: {error.strerror}.") from error
    if _HEAD.unpack_from(first, _PAGE_HEADER)[1] != _VERSION:
        return None  # LMDB's own checks must do.
    metas = [_meta(first), _meta(second)]
    if None in metas:
        return "one of its first two pages is damaged"
    _, last = max(meta for meta in metas if meta is not None)
    whole = (last + 1) * page_size
    return f"it ends after {size} of {whole} bytes" if size < whole else None


def _page_size(page: bytes) -> int | None:
    if len(page) < 512 or _HEAD.unpack_from(page, _PAGE_HEADER)[0] != _MAGIC:
        return None
    size = int(_SIZE.unpack_from(page, _PAGE_HEADER + _SIZE_AT)[0])
    return size if 512 <= size <= 65536 and not size & (size - 1) else None


def _meta(page: bytes) -> tuple[int, int] | None:
    """Return (transaction, last page) of a meta page, None if it is none."""
    if len(page) < 512 or _HEAD.unpack_from(page, _PAGE_HEADER) != (_MAGIC, _VERSION):
        return None
    last, transaction = _TAIL.unpack_from(page, _PAGE_HEADER + _TAIL_AT)
    return transaction, last


def suspect(path: Path) -> None:
    """Leave a note that the data file is damaged: whoever opens it next moves it aside."""
    with suppress(OSError):
        (path / SUSPECT).touch(mode=0o600)


def move_aside(path: Path, reason: str) -> None:
    """Rename the data file, over one that was moved earlier, with one warning. The next opening starts empty."""
    file, kept = path / DATA, path / DAMAGED
    size = file.stat().st_size
    os.replace(file, kept)
    (path / SUSPECT).unlink(missing_ok=True)
    log.warning(
        "The cache file %s is damaged (%s): it was renamed to %s, and the cache starts empty. "
        "Deleting the renamed file frees up to %s.",
        file, reason, kept.name, format_bytes(size),
    )  # fmt: skip
