"""What the mover asks tiers for: few round trips, and no page is dropped for bytes that somebody just improved."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tailreplay.cache import PrefixCache
from tailreplay.storage import Storage
from tailreplay.tiers import orders
from tailreplay.tiers.base import KV
from tests.core.tiny import LAYOUT, NAMESPACE, PAGE, REPLAY, TOPOLOGY, store
from tests.tiers.memory_tier import MemoryTier

PAGES = 40
PROMPT = [*range(PAGES * PAGE)]


class ChangingTier(MemoryTier):
    """Puts pages anew, as something else, while they are being read."""

    changes = False

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        for key, view in zip(keys, super().get(keys, part), strict=True):
            if self.changes and part == KV and view is not None:
                self.pages[key].header += b" "
                view = memoryview(bytes(len(view)))
            yield view


def opened(tier: MemoryTier, pages: int = 2 * PAGES) -> PrefixCache:
    cache = PrefixCache(
        pages * LAYOUT.page_bytes, page_size=PAGE, storage=Storage((tier,), hidden_codec="none", deadline=60.0)
    )
    cache.bind(LAYOUT)
    return cache


def prefetched(cache: PrefixCache) -> int:
    return cache.prefetch(PROMPT, NAMESPACE, REPLAY, TOPOLOGY)


def test_pages_are_looked_up_together_though_they_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    tier = MemoryTier(1 << 24, lambda method: calls.update([method]))
    cache = opened(tier)
    store(cache, PROMPT)
    assert cache.flush()
    cache.clear()
    calls.clear()
    monkeypatch.setattr(orders, "BATCH_BYTES", 2 * LAYOUT.page_bytes)
    assert prefetched(cache) == PAGES
    # Two of the finder's, whose batches grow, and one of the mover's.
    assert calls["contains"] == 3


def test_bytes_that_changed_since_the_look_up_are_not_damage() -> None:
    tier = ChangingTier(1 << 24)
    cache = opened(tier)
    store(cache, PROMPT)
    assert cache.flush()
    cache.clear()
    tier.changes = True
    assert prefetched(cache) == 0
    assert len(tier.pages) == PAGES
    assert cache.stats().moved.get("damaged", 0) == 0


def test_what_waits_for_a_tier_that_hangs_does_not_grow(tier: MemoryTier) -> None:
    """Pages are stored and evicted much faster than the tier takes them: those that are gone do not wait."""
    going = threading.Event()
    tier.before = lambda method: going.wait(60.0) and None if method == "put" else None
    cache = opened(tier, pages=8)
    for number in range(60):
        store(cache, [1000 + number] * (2 * PAGE))
    assert cache._lower is not None
    assert len(cache._lower._waiting) <= 2 * 8
    going.set()
    assert cache.flush()
    assert cache.stats().moved["lost"] > 0
    assert cache.stats().pinned == 0
