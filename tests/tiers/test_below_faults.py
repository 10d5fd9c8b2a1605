"""A cache over tiers when something happens that nobody foresaw: it goes on, and nothing waits for ever."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest.mock import patch

import pytest

from tailreplay.modes import parse_reuse
from tailreplay.page_format import pack_header, unpack_header
from tailreplay.provenance import EXACT, Provenance
from tailreplay.tiers.packing import Packer
from tests.core.tiny import EXACTLY, PAGE, look_up, matched, store
from tests.tiers.memory_tier import MemoryTier
from tests.tiers.test_below import PROMPT, make_cache


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(1 << 24)


def test_storing_after_a_shutdown_ends(tier: MemoryTier) -> None:
    cache = make_cache(tier)
    store(cache, PROMPT)
    cache.shutdown()
    thread = threading.Thread(target=store, args=(cache, [7] * 40), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert cache.flush(1)
    assert matched(cache, [7] * 40) == 39
    assert cache.stats().moved["lost"] == 3


def test_a_shutdown_in_the_middle_of_writing_ends(tier: MemoryTier) -> None:
    """More waits to be written than is ordered at once, and the tier takes longer than a shutdown waits."""
    goes_on = threading.Event()
    tier.before = lambda method: None if method != "put" else (goes_on.wait(20), None)[1]
    cache = make_cache(tier, pages=8, deadline=30.0)
    store(cache, PROMPT)
    with patch("tailreplay.tiers.lower._CLOSE_SECONDS", 0.1):
        closing = threading.Thread(target=cache.shutdown, daemon=True)
        closing.start()
        closing.join(0.5)
        goes_on.set()
        closing.join(15)
    assert not closing.is_alive()
    assert cache.flush(1)
    assert cache.stats().pinned == 0


@pytest.mark.parametrize("method", ["unpack", "check"])
def test_an_error_while_fetching_does_not_end_fetching(tier: MemoryTier, method: str) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    with patch.object(Packer, method, side_effect=RuntimeError("unforeseen")):
        assert matched(second, PROMPT) == 0
    assert second.stats().pinned == 0
    assert matched(second, PROMPT) == len(PROMPT) - 1


def test_an_error_while_writing_does_not_end_writing(tier: MemoryTier) -> None:
    cache = make_cache(tier)
    with patch.object(Packer, "pack", side_effect=RuntimeError("unforeseen")):
        store(cache, PROMPT)
        assert cache.flush(10)
    assert not tier.pages
    store(cache, [7] * 40)
    assert cache.flush(10)
    assert len(tier.pages) == 3
    assert cache.stats().pinned == 0


def test_a_codec_that_is_not_known_is_a_miss(tier: MemoryTier) -> None:
    """As a later release may have written it."""
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    for page in tier.pages.values():
        header = unpack_header(page.header)
        parts = {
            name: replace(part, tensors=tuple(replace(each, codec="int4") for each in part.tensors))
            for name, part in header.parts.items()
        }
        page.header = pack_header(replace(header, parts=parts))
    assert matched(second, PROMPT) == 0
    assert second.stats().pinned == 0
    store(second, PROMPT)
    assert second.flush()
    assert matched(make_cache(tier), PROMPT) == len(PROMPT) - 1


def test_parts_of_two_origins_are_as_bad_as_both() -> None:
    """Keys and values after a replay on one tier, quantised hiddens on another: neither is better in every respect."""
    near, far = MemoryTier(1 << 24), MemoryTier(1 << 24)
    prompt = PROMPT[: 2 * PAGE + 1]
    store_of = {near: make_cache(near, hidden_codec="none"), far: make_cache(far, hidden_codec="int8")}
    store(store_of[near], prompt, provenance=Provenance(1, False))
    store(store_of[far], prompt, provenance=EXACT)
    for tier, cache in store_of.items():
        assert cache.flush()
        tier.hints.clear()
    for page in near.pages.values():
        del page.parts["hidden"]
    cache = make_cache(near, far)
    pages = dict(far.pages)
    plan = look_up(cache, prompt)
    assert plan.matched == 2 * PAGE
    assert all(page.provenance == Provenance(1, True) for page in plan.pages)
    assert plan.provenance.lossy
    assert far.pages == pages
    assert not cache.stats().moved.get("damaged")
    cache.release(plan)


@pytest.mark.parametrize("host", [{"host_codec": "int8"}, {"host_kv_codec": "int8"}])
def test_exact_pages_are_not_exact_in_host_memory_that_quantises(tier: MemoryTier, host: dict[str, str]) -> None:
    """Two servers share a tier; only one of them holds pages without loss."""
    first, second = make_cache(tier), make_cache(tier, **host)
    store(first, PROMPT)
    assert first.flush()
    plan = look_up(second, PROMPT, EXACTLY)
    assert plan.matched == 0
    second.release(plan)
    plan = look_up(second, PROMPT, parse_reuse("replay", 1.0))
    assert plan.matched == plan.replayed == len(PROMPT) - 1
    assert not plan.exact
    assert plan.provenance == Provenance(0, True)
    second.release(plan)
    assert matched(first, PROMPT, EXACTLY) == len(PROMPT) - 1


@pytest.mark.parametrize("worse", [False, True])
def test_a_page_that_is_replaced_while_it_is_fetched_stays(tier: MemoryTier, worse: bool) -> None:
    """Between look-up and fetch, or between its header and its parts."""
    old, new = make_cache(tier), make_cache(tier)
    prompt = PROMPT[: PAGE + 1]
    store(old, prompt, provenance=Provenance(1, False))
    assert old.flush()
    before = dict(tier.pages)
    tier.pages.clear()
    store(new, prompt, provenance=Provenance(2, False) if worse else EXACT)
    assert new.flush()
    after = dict(tier.pages)
    tier.pages = dict(before)
    seen: list[str] = []

    def replaced(method: str) -> None:
        seen.append(method)
        if (seen.count("contains"), "get" in seen) == (4, not worse):
            tier.pages = dict(after)

    cache = make_cache(tier)
    tier.before = replaced
    plan = look_up(cache, prompt)
    assert tier.pages == after, seen
    assert cache.stats().moved.get("damaged", 0) == 0
    cache.release(plan)
    assert matched(cache, prompt) == PAGE


def test_what_is_damaged_in_host_memory_is_not_written(tier: MemoryTier) -> None:
    """Its turn comes late; a checksum of the damaged bytes would make them right for everybody."""
    goes_on = threading.Event()
    tier.before = lambda method: None if method != "put" else (goes_on.wait(20), None)[1]
    cache = make_cache(tier, pages=8, deadline=30.0)
    store(cache, PROMPT)
    assert cache._arena is not None
    assert cache._catalog is not None
    last = max(cache._catalog.resident(), key=lambda page: page.start)
    cache._arena.rows(cache._arena.layout.kv_parts[0], last.slot, 1)[0, 0] ^= 1
    goes_on.set()
    assert cache.flush(10)
    assert len(tier.pages) == 5
    assert cache.stats().moved["unfit"] == 1
    assert matched(make_cache(tier), PROMPT) == 5 * PAGE
