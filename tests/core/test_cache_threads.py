"""Several threads on one small cache: nobody ever reads another sequence's numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest

from tailreplay import PrefixCache
from tailreplay.provenance import Provenance
from tests.core.tiny import EXACTLY, PAGE, REPLAY, assert_contents, look_up, make_cache, store

THREADS, ROUNDS = 4, 150


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def random_prompt(rng: random.Random) -> list[int]:
    """Two choices a page: most prompts share pages with others, and many part inside one."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 4)):
        value = rng.randint(0, 1)
        tokens += [value] * rng.choice([PAGE, PAGE, PAGE - 1, 5])
    return tokens


def work(cache: PrefixCache, seed: int, start: threading.Barrier, counts: dict[str, int]) -> None:
    rng = random.Random(seed)
    start.wait()
    for _ in range(ROUNDS):
        tokens = random_prompt(rng)
        plan = look_up(cache, tokens, EXACTLY if rng.random() < 0.3 else REPLAY)
        assert not plan.exact or plan.provenance == Provenance()
        if plan.matched:
            counts["hits"] += 1
            assert_contents(cache.fetch(plan), plan, tokens)
        depth = max([page.provenance.depth for page in plan.pages], default=0) or rng.randint(0, 1)
        if rng.random() < 0.5:
            counts["stored"] += store(cache, tokens, plan, Provenance(depth))
        else:
            counts["stored"] += store(cache, tokens, None, Provenance(rng.randint(0, 1)))
        if plan.matched:
            assert_contents(cache.fetch(plan), plan, tokens)
        cache.release(plan)
        stats = cache.stats()
        assert stats.bytes_used <= stats.bytes_limit
        if rng.random() < 0.02:
            cache.clear()


@pytest.mark.parametrize("pages", [3, 12])
def test_threads_read_what_was_stored_for_their_prompt(pages: int) -> None:
    cache = make_cache(pages)
    start = threading.Barrier(THREADS)
    counts = [{"hits": 0, "stored": 0} for _ in range(THREADS)]
    errors: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(cache, seed, start, counts[seed])
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(count["hits"] and count["stored"] for count in counts)
    assert cache.stats().evictions
    assert cache.stats().pinned == 0
    cache.clear()
    assert cache.stats().bytes_used == 0
