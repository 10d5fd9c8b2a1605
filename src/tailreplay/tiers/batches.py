"""What tiers on servers do with the pages they are given: cut them into batches, and find out what to write."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tailreplay.tiers.base import PARTS, Buffer, Found, TierPage
from tailreplay.tiers.merging import Merge, merge

T = TypeVar("T")


@dataclass(slots=True)
class Changes:
    """What a batch changes.

    Attributes
    ----------
    pages : dict
        Key -> what to write. Parts in `Merge.drop` may not be there.
    hints : dict
        Hint -> key, those to write.
    """

    pages: dict[bytes, Merge] = field(default_factory=dict)
    hints: dict[bytes, bytes] = field(default_factory=dict)


def changes(pages: Sequence[TierPage], found: Sequence[Found | None], hints: Container[bytes]) -> Changes:
    """Say what a put writes, given what is `found` of each page and the `hints` that are there."""
    made = Changes()
    for page, there in zip(pages, found, strict=True):
        change = merge(there, page)
        if change is not None:
            made.pages[page.key] = change if there is not None else replacement(page)
        for hint in page.hints:
            # A hint of a page that is there already may lead to another page: both are right.
            if there is None or hint not in hints:
                made.hints[hint] = page.key
    return made


def replacement(page: TierPage) -> Merge:
    """Return what makes `page` all that is there under its key: parts without a header are of unknown origin."""
    return Merge(page.header, page.parts, frozenset(PARTS) - set(page.parts))


def contiguous(buffers: Sequence[Buffer]) -> bytes | memoryview:
    """Return the concatenation of `buffers` as one buffer; a single one is not copied."""
    if len(buffers) == 1:
        return memoryview(buffers[0]).cast("B")
    return b"".join(buffers)


def by_bytes(pages: Sequence[TierPage], nbytes: int) -> Iterator[list[TierPage]]:
    """Yield `pages` in order, in batches of at most `nbytes` bytes, or of one page."""
    batch: list[TierPage] = []
    held = 0
    for page in pages:
        if batch and held + page.nbytes > nbytes:
            yield batch
            batch, held = [], 0
        batch.append(page)
        held += page.nbytes
    if batch:
        yield batch


def by_count(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Yield `items` in order, in batches of at most `count`."""
    for at in range(0, len(items), count):
        yield items[at : at + count]
