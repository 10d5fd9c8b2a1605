"""What the mover asks tiers for: few round trips, and no page is dropped for bytes that somebody just improved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tailreplay.cache import PrefixCache
from tailreplay.storage import Storage
from tailreplay.tiers import mover
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


def opened(tier: MemoryTier) -> PrefixCache:
    cache = PrefixCache(
        2 * PAGES * LAYOUT.page_bytes, page_size=PAGE, storage=Storage((tier,), hidden_codec="none", deadline=5.0)
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
    monkeypatch.setattr(mover, "_BATCH_BYTES", 2 * LAYOUT.page_bytes)
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
