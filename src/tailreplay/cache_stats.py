"""What a cache tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of the cache. Bytes and pages now; the rest since the start.

    Attributes
    ----------
    stripped : int
        Pages whose hiddens made room for others'.
    damaged : int
        Pages in host memory whose bytes were not what was stored.
    tokens_limit : int
        Tokens that fit into host memory.
    moved : dict
        What went to and came from the tiers below (see `tailreplay.tiers.mover.Mover.counts`).
    anchors, anchor_slots : int
        Saved states that are there, and how many there is room for; their bytes are in `bytes_used`.
    anchor_evictions : int
        Saved states that made room for others.
    """

    pages: int
    pinned: int
    bytes_used: int
    bytes_limit: int
    evictions: int
    refused: dict[str, int] = field(default_factory=dict)
    stripped: int = 0
    damaged: int = 0
    tokens_limit: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    anchors: int = 0
    anchor_slots: int = 0
    anchor_evictions: int = 0
