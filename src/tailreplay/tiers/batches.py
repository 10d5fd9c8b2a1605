"""Cuts long lists into batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tailreplay.tiers.base import TierPage

T = TypeVar("T")


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
