"""What is ordered of a mover: one page up, or one page down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tailreplay.tiers.naming import PageRecord

BATCH_BYTES = 8 << 20
BATCH_PAGES = 64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring one page into host memory.

    Attributes
    ----------
    tag : int
        Names it in what comes back.
    slots : tuple of (str, int, int, int)
        (part, slot, index of the tier, bytes) of each part to bring.
    """

    tag: int
    record: PageRecord
    slots: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Spill:
    """Write one page to every tier. Its slots must not change until it comes back as done."""

    tag: int
    record: PageRecord
    slot: int
    hidden_slot: int


Done = Callable[[int, bool], None]
"""``done(tag, good)``, on a thread of the mover's (or the caller's, if it refuses)."""


def cut(items: Sequence[_T], size_of: Callable[[_T], int]) -> list[list[_T]]:
    """Cut items into runs of a few MiB and at most 64, so that each ends within a tier's deadline."""
    runs: list[list[_T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not runs or size > room or len(runs[-1]) == BATCH_PAGES:
            runs.append([])
            room = BATCH_BYTES
        runs[-1].append(item)
        room -= size
    return runs
