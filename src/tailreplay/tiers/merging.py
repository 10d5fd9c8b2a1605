"""What putting a page does to one that is there already; the same on every tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tailreplay.page_format import PageFormatError, PageHeader, pack_header, unpack_header
from tailreplay.tiers.base import Buffer, Found, TierPage


@dataclass(frozen=True, slots=True)
class Merge:
    """What to write.

    Attributes
    ----------
    header : bytes
        Replaces the one that is there.
    parts : mapping
        Replace those that are there.
    drop : frozenset of str
        Parts to be removed, since the header says nothing of them any more.
    """

    header: bytes
    parts: Mapping[str, Sequence[Buffer]]
    drop: frozenset[str] = frozenset()


def merge(found: Found | None, page: TierPage) -> Merge | None:
    """Decide what a put writes; None if nothing. Numbers of the same tokens from two computations are never mixed up:
    the header keeps the checksum of each part that stays.

    The page gets the parts that it lacks. If their provenance is worse than the page's, it stays as it is; if it is
    better and they stand for all that is there, they replace it.

    Parameters
    ----------
    found : Found or None
        What is there under the page's key.
    """
    if found is None:
        return Merge(page.header, page.parts)
    lacking = {name: data for name, data in page.parts.items() if name not in found.parts}
    if found.header == page.header:
        return Merge(page.header, lacking) if lacking else None
    over = Merge(page.header, page.parts, found.parts - set(page.parts))
    try:
        old, new = unpack_header(found.header), unpack_header(page.header)
    except PageFormatError:
        return over if lacking else None
    if _same_tokens(old, new) and new.provenance < old.provenance and not over.drop:
        return over
    if not lacking:
        return None
    if not _same_tokens(old, new) or not found.parts:
        return over
    if new.provenance > old.provenance:
        return None
    entries = {name: entry for name, entry in old.parts.items() if name in found.parts}
    header = replace(new, parts={**new.parts, **entries}, provenance=old.provenance.worst(new.provenance))
    return Merge(pack_header(header), lacking)


def _same_tokens(old: PageHeader, new: PageHeader) -> bool:
    return (old.key, old.namespace, old.start, old.ids, old.rank) == (
        new.key,
        new.namespace,
        new.start,
        new.ids,
        new.rank,
    )
