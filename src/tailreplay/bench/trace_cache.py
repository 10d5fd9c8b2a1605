"""What tailreplay's own counters say after a load: kinds of hits, and bytes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tailreplay.bench.endpoint import Endpoint

_SECONDS = 15  # that counters may take to come: vLLM gathers them now and then
_PAUSE = 0.5
NAMES = ("lookups", "hits", "complete_hits", "anchor_hits", "replayed_tokens", "bytes", "anchors")


async def settled(endpoint: Endpoint, requests: int) -> dict[str, float]:
    """Return the counts of a server once all `requests` requests are in them, or it seems that they will not be.

    Returns
    -------
    dict
        By `NAMES`, and ``exact``: hits whose states were exact. Empty for a server that is not tailreplay.
    """
    until = time.monotonic() + _SECONDS
    while True:
        lookups, series = await endpoint.lookups(), await endpoint.series()
        if not lookups or series is None:
            return {}
        if sum(lookups.values()) >= requests or time.monotonic() > until:
            break
        await asyncio.sleep(_PAUSE)
    hits = sum(count for name, count in lookups.items() if name.startswith("hits:"))
    return {
        "lookups": sum(lookups.values()),
        "hits": hits,
        "exact": lookups["hits:exact"],
        "complete_hits": series.get("hit_starts:complete", 0.0),
        "anchor_hits": series.get("anchor_hits", 0.0),
        "replayed_tokens": series.get("replayed_tokens", 0.0),
        "bytes": series.get("cache_bytes", 0.0),
        "anchors": series.get("cache_anchors", 0.0),
    }


def cache_report(held: dict[str, float]) -> dict[str, Any]:
    """Return the report's part about the cache; None where the server does not say."""
    report: dict[str, Any] = {f"cache_{name}": held.get(name) for name in NAMES}
    report["exact_hit_share"] = held["exact"] / held["hits"] if held.get("hits") else None
    return report
