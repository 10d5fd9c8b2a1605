"""What a tier does when a page that it has already is put again: nothing, add parts, or write it anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailreplay.page_format import PageFormatError, pack_header, unpack_header
from tailreplay.tiers.base import PARTS, Buffer, Found, TierPage


@dataclass(frozen=True, slots=True)
class Write:
    """What is to be written of one page.

    Attributes
    ----------
    page : TierPage
        As it was put.
    header : bytes
        The header to write; it speaks of all parts that are there afterwards.
    parts : tuple of str
        Parts of `page` to write.
    """

    page: TierPage
    header: bytes
    parts: tuple[str, ...]


def missing(page: TierPage, found: Found | None) -> Write | None:
    """Say what `page` adds to what is there; None if it adds nothing.

    A part without a header is of unknown origin, so it is written again. Parts that stay keep their entry in the header.
    """
    if found is None:
        return Write(page, page.header, tuple(page.parts))
    added = tuple(part for part in page.parts if part not in found.parts)
    if not added:
        return None
    return Write(page, merge_headers(found.header, page.header, found.parts), added)


def merge_headers(old: bytes, new: bytes, kept: frozenset[str]) -> bytes:
    """Return `new` with `old`'s entries of the parts that are `kept`, and the worse provenance of both.

    The same tokens computed twice may differ in their last bits, so the checksum of a part that stays is the old header's.
    Where either cannot be read, `new` is returned: a part that it does not describe rightly is found damaged, and dropped.
    """
    try:
        before, after = unpack_header(old), unpack_header(new)
    except PageFormatError:
        return new
    stay = {name: entry for name, entry in before.parts.items() if name in kept}
    if not stay or (before.ids, before.start) != (after.ids, after.start):
        return new
    worse = max(before.provenance, after.provenance)
    return pack_header(replace(after, parts={**after.parts, **stay}, provenance=worse))


def contiguous(buffers: Sequence[Buffer]) -> bytes | memoryview:
    """Return the concatenation of `buffers` as one buffer; a single one is not copied."""
    if len(buffers) == 1:
        return memoryview(buffers[0]).cast("B")
    return b"".join(buffers)


def absent_parts(page: TierPage) -> list[str]:
    """Return the names in `base.PARTS` that `page` does not bring."""
    return [part for part in PARTS if part not in page.parts]
