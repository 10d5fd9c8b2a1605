"""Pages in one file, to be taken to another machine.

``TRPA``, version (u16); then each page: ``PAGE``, key, tenant, number of hints (u16), bytes of header (u32), kv and hidden
(i64, -1 if absent), hints, header, xxh3 of all that (u64), kv, hidden; then ``DONE`` and the number of pages (u64).
Big-endian. The header has the checksums of the parts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64_intdigest

from tailreplay.errors import CacheConfigError
from tailreplay.page_format import PageFormatError, PageHeader, is_intact, unpack_header
from tailreplay.tiers.base import PARTS, TierPage

MAGIC, VERSION = b"TRPA", 1
_FILE = struct.Struct(">4sH")
_PAGE = struct.Struct(">32s8sHIqq")
_SUM = struct.Struct(">Q")
_PAGE_MARK, _END_MARK = b"PAGE", b"DONE"
_ABSENT = -1
# Nobody has headers or parts of this size: lengths beyond are damage, and not worth allocating.
_MAX_HEADER, _MAX_PART = 2**26, 2**36


class ArchiveError(CacheConfigError):
    """The file is no archive of pages, or it is damaged; one sentence."""


def write_archive(path: Path, pages: Iterable[TierPage]) -> int:
    """Write pages to a file that only its owner can read, and that is there as a whole or not at all.

    Returns
    -------
    int
        Number of pages.

    Raises
    ------
    ArchiveError
        If it cannot be written.
    """
    # Renaming the finished file over a device or a pipe would take it away from everybody who uses it.
    if not path.name or (os.path.lexists(path) and not path.is_file()):
        raise ArchiveError(f"'{path}' is no file: name one to be written.")
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            count = _write(file, pages)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise ArchiveError(f"'{path}' cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return count


def _write(file: BinaryIO, pages: Iterable[TierPage]) -> int:
    file.write(_FILE.pack(MAGIC, VERSION))
    count = 0
    for page in pages:
        sizes = [sum(memoryview(b).nbytes for b in page.parts[p]) if p in page.parts else _ABSENT for p in PARTS]
        fixed = _PAGE.pack(page.key, page.tenant, len(page.hints), len(page.header), *sizes)
        checked = fixed + b"".join(page.hints) + page.header
        file.write(_PAGE_MARK + checked + _SUM.pack(xxh3_64_intdigest(checked)))
        for part in PARTS:
            for buffer in page.parts.get(part, ()):
                file.write(buffer)
        count += 1
    file.write(_END_MARK + _SUM.pack(count))
    return count


def read_archive(path: Path) -> Iterator[TierPage]:
    """Yield the pages of a file, each of them checked.

    Raises
    ------
    ArchiveError
        If the file cannot be read, is no archive, or is damaged; the pages before the damage have been yielded.
    """
    try:
        with path.open("rb") as file:
            yield from _read(file, path)
    except OSError as error:
        raise ArchiveError(f"'{path}' cannot be read: {error.strerror}.") from error


def _read(file: BinaryIO, path: Path) -> Iterator[TierPage]:
    head = file.read(_FILE.size)
    if len(head) < _FILE.size or head[:4] != MAGIC:
        raise ArchiveError(f"'{path}' is no file that 'tailreplay cache export' wrote.")
    version = _FILE.unpack(head)[1]
    if version != VERSION:
        raise ArchiveError(f"'{path}' has format version {version}; this release reads version {VERSION}.")
    count = 0
    while (mark := file.read(4)) == _PAGE_MARK:
        page = _read_page(file)
        if page is None:
            raise ArchiveError(f"'{path}' is damaged after {count} whole pages.")
        count += 1
        yield page
    if mark != _END_MARK or file.read() != _SUM.pack(count):
        raise ArchiveError(f"'{path}' is damaged after {count} whole pages.")


def _read_page(file: BinaryIO) -> TierPage | None:
    fixed = file.read(_PAGE.size)
    if len(fixed) < _PAGE.size:
        return None
    key, tenant, hints, header_size, *sizes = _PAGE.unpack(fixed)
    if header_size > _MAX_HEADER or not all(_ABSENT <= size <= _MAX_PART for size in sizes):
        return None
    rest = file.read(32 * hints + header_size)
    checksum = file.read(_SUM.size)
    if checksum != _SUM.pack(xxh3_64_intdigest(fixed + rest)):
        return None
    names = tuple(rest[at : at + 32] for at in range(0, 32 * hints, 32))
    parts = {part: [file.read(size)] for part, size in zip(PARTS, sizes, strict=True) if size != _ABSENT}
    header = rest[32 * hints :]
    if known_header(header, {part: data[0] for part, data in parts.items()}) is None:
        return None
    return TierPage(key, header, parts, names, tenant)


def known_header(header: bytes, parts: dict[str, bytes] | dict[str, memoryview]) -> PageHeader | None:
    """Return the header of a page whose parts are all intact, None of any other."""
    try:
        known = unpack_header(header)
    except PageFormatError:
        return None
    whole = all(part in known.parts and is_intact(known.parts[part], data) for part, data in parts.items())
    return known if whole else None
