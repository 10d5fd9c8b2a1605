"""A prefix cache over tiers: what goes down comes up again, for whoever shares them, and never as something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tailreplay.cache import PrefixCache
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse, parse_reuse
from tailreplay.plan import ReplayPlan
from tailreplay.provenance import EXACT, Provenance
from tailreplay.storage import Storage
from tailreplay.tiers.base import HIDDEN, KV, Tier
from tests.core.tiny import EXACTLY, LAYOUT, NAMESPACE, PAGE, REPLAY, TOPOLOGY, contents, look_up, matched, store
from tests.tiers.memory_tier import MemoryTier

PROMPT = list(range(100, 100 + 5 * PAGE + 7))


def make_cache(*tiers: Tier, pages: int = 32, **storage: object) -> PrefixCache:
    cache = PrefixCache(
        pages * LAYOUT.page_bytes,
        page_size=PAGE,
        storage=Storage(tiers=tiers, **{"hidden_codec": "none", "deadline": 5.0, **storage}),  # type: ignore[arg-type]
    )
    cache.bind(LAYOUT)
    return cache


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(1 << 24)


def check(cache: PrefixCache, plan: ReplayPlan, tokens: Sequence[int], hidden: bool = True, close: float = 0) -> None:
    """Compare every number behind `plan` that it needs with what was stored."""
    m = plan.matched
    view = cache.fetch(plan)
    keys, values = torch.empty(m, 1, 2), torch.empty(m, 1, 2)
    view.keys_values(0, keys, values)
    [(k, v)], [h] = contents(tokens[:m], 0, plan.pages[0].provenance.depth)
    torch.testing.assert_close((keys, values), (k, v), rtol=0, atol=0)
    got = torch.empty(m - plan.tail_start, 3)
    view.hidden(0, plan.tail_start, m, got)
    torch.testing.assert_close(got, h[plan.tail_start :], rtol=close, atol=0)


def test_what_one_cache_stores_another_finds(tier: MemoryTier) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    assert matched(second, PROMPT) == len(PROMPT) - 1
    assert matched(second, PROMPT, EXACTLY) == len(PROMPT) - 1
    plan = look_up(second, PROMPT)
    assert plan.exact == (plan.replayed == plan.matched)
    check(second, plan, PROMPT)
    second.release(plan)
    assert second.stats().pinned == first.stats().pinned == 0


@pytest.mark.parametrize("length", [3, PAGE, PAGE + 1, 2 * PAGE, 40, 70, len(PROMPT)])
def test_a_prompt_may_part_from_what_is_stored_anywhere(tier: MemoryTier, length: int) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    prompt = [*PROMPT[:length], 9, 9, 9, 9]
    m = matched(second, prompt)
    # Within a page it is found by its first 16 tokens, or by all that there are.
    assert m == (length if length % PAGE == 0 or length == len(PROMPT) else length // PAGE * PAGE)
    plan = look_up(second, prompt)
    if m:
        check(second, plan, prompt)
    second.release(plan)


def test_going_on_where_a_sequence_ended(tier: MemoryTier) -> None:
    """Three turns of a chat, each answered by another cache."""
    prompt = PROMPT[:37]
    for turn in range(3):
        cache = make_cache(tier)
        plan = look_up(cache, prompt)
        assert plan.matched == (len(prompt) - 5 if turn else 0)
        store(cache, prompt, plan)
        cache.release(plan)
        assert cache.flush()
        prompt = [*prompt, *[turn + 1] * 5]


def test_tenants_and_models_never_share_through_a_tier(tier: MemoryTier) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    for other in (
        Namespace("model", LAYOUT.digest, PAGE, salt="tenant"),
        Namespace("another", LAYOUT.digest, PAGE),
        Namespace("model", "another layout", PAGE),
        Namespace("model", LAYOUT.digest, PAGE, adapter="lora"),
        Namespace("model", LAYOUT.digest, PAGE, images=("picture@0",)),
    ):
        assert matched(second, PROMPT, namespace=other) == 0
    assert matched(second, PROMPT) == len(PROMPT) - 1


def test_only_the_tails_hiddens_are_fetched(tier: MemoryTier) -> None:
    asked: list[tuple[str, int]] = []
    plain = tier.get

    def get(keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        asked.append((part, len(keys)))
        return plain(keys, part)

    tier.get = get  # type: ignore[method-assign]
    first, second = make_cache(tier, pages=64), make_cache(tier, pages=64)
    long = list(range(1000, 1000 + 40 * PAGE))
    store(first, long)
    assert first.flush()
    reuse = parse_reuse("replay", 0.05, min_tokens=16)
    plan = look_up(second, long, reuse)
    assert (plan.matched, plan.replayed, plan.short_tail) == (len(long) - 1, 32, False)
    assert sum(count for part, count in asked if part == KV) == 40
    assert sum(count for part, count in asked if part == HIDDEN) == 2 + 1  # 32 tokens may lie in three pages
    check(second, plan, long)
    second.release(plan)
    # A hit at another place needs other hiddens: they are fetched now, and no keys and values again.
    asked.clear()
    plan = look_up(second, [*long[: 20 * PAGE], 5, 5], reuse)
    assert (plan.matched, plan.replayed) == (20 * PAGE, 16)
    assert asked == [(HIDDEN, 1)]
    check(second, plan, long)
    second.release(plan)
    # Exact mode needs all of them.
    asked.clear()
    plan = look_up(second, long, EXACTLY)
    assert (plan.matched, plan.replayed, plan.exact) == (len(long) - 1, len(long) - 1, True)
    assert {part for part, _ in asked} == {HIDDEN}
    check(second, plan, long)
    second.release(plan)


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
def test_what_went_through_a_lossy_codec_is_never_called_exact(tier: MemoryTier, codec: str) -> None:
    first, second = make_cache(tier, hidden_codec=codec), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    assert matched(second, PROMPT, EXACTLY) == 0
    plan = look_up(second, PROMPT)
    assert plan.matched == len(PROMPT) - 1
    assert not plan.exact
    assert plan.provenance.lossy
    check(second, plan, PROMPT, close=0.1)
    assert look_up(second, PROMPT, EXACTLY).miss_reason == "only_approximate_pages"
    second.release(plan)
    # The first cache holds its own pages without loss.
    assert matched(first, PROMPT, EXACTLY) == len(PROMPT) - 1
    # An exact recomputation takes the place of the lossy pages.
    store(second, PROMPT)
    assert matched(second, PROMPT, EXACTLY) == len(PROMPT) - 1


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
def test_a_lossy_host_codec_is_passed_on_as_it_is(tier: MemoryTier, codec: str) -> None:
    first, second = make_cache(tier, host_codec=codec, hidden_codec="none"), make_cache(tier, host_codec=codec)
    store(first, PROMPT)
    assert first.flush()
    plans = [look_up(cache, PROMPT) for cache in (first, second)]
    hiddens = []
    for cache, plan in zip((first, second), plans, strict=True):
        assert (plan.matched, plan.exact, plan.provenance) == (
            len(PROMPT) - 1,
            False,
            plan.provenance._replace(lossy=True),
        )
        check(cache, plan, PROMPT, close=0.1)
        hiddens.append(torch.empty(plan.replayed, 3))
        cache.fetch(plan).hidden(0, plan.tail_start, plan.matched, hiddens[-1])
        cache.release(plan)
    assert torch.equal(*hiddens)
    assert first.stats().bytes_used < make_cache().stats().bytes_limit


def test_better_pages_take_the_place_of_worse_ones_in_a_tier(tier: MemoryTier) -> None:
    first = make_cache(tier)
    store(first, PROMPT, provenance=Provenance(2))
    assert first.flush()
    assert matched(make_cache(tier), PROMPT, EXACTLY) == 0
    store(first, PROMPT, provenance=EXACT)
    assert first.flush()
    assert matched(make_cache(tier), PROMPT, EXACTLY) == len(PROMPT) - 1
    store(first, PROMPT, provenance=Provenance(1))
    assert first.flush()
    assert matched(make_cache(tier), PROMPT, EXACTLY) == len(PROMPT) - 1


def test_the_fastest_tier_that_has_a_part_gives_it(tier: MemoryTier) -> None:
    slow = MemoryTier(1 << 24)
    first = make_cache(tier, slow)
    store(first, PROMPT)
    assert first.flush()
    gone = list(tier.pages)
    tier.drop(gone[:1], HIDDEN)
    tier.drop(gone[1:2])
    second = make_cache(tier, slow)
    plan = look_up(second, PROMPT, EXACTLY)
    assert plan.matched == len(PROMPT) - 1
    check(second, plan, PROMPT)
    second.release(plan)


def test_host_memory_smaller_than_a_prompt_takes_what_it_can(tier: MemoryTier) -> None:
    first = make_cache(tier, pages=8)
    long = list(range(1000, 1000 + 30 * PAGE))
    store(first, long)
    assert first.flush()
    assert len(tier.pages) == 8  # a sequence ends where host memory is full of it
    store(make_cache(tier, pages=64), long)
    second = make_cache(tier, pages=64)
    store(second, long)
    assert second.flush()
    first.clear()
    plan = look_up(first, long)
    assert 4 * PAGE <= plan.matched <= 8 * PAGE
    check(first, plan, long)
    first.release(plan)
    assert first.stats().bytes_used <= first.host_bytes


def damage_every(tier: MemoryTier, change: Callable[[bytes], bytes], part: str) -> None:
    for page in tier.pages.values():
        if part == "header":
            page.header = change(page.header)
        elif part in page.parts:
            page.parts[part] = change(page.parts[part])


@pytest.mark.parametrize("part", ["header", KV, HIDDEN])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: data[:4] + b"\x00\x07" + data[6:],  # of a header: a version to come
    ],
    ids=["cut", "flipped", "empty", "longer", "version"],
)
def test_damage_is_a_miss_and_the_page_is_dropped(
    tier: MemoryTier, part: str, change: Callable[[bytes], bytes]
) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    damage_every(tier, change, part)
    assert matched(second, PROMPT) == 0
    stats = second.stats()
    assert stats.moved.get("damaged", 0) + stats.moved["passed_over"] > 0
    # Where only hiddens are damaged, keys and values before the tail have come.
    assert (stats.pages, stats.pinned) == (part == HIDDEN, 0)
    # Stored anew, all is well; a page that is met only now is dropped now.
    for _ in range(2):
        store(second, PROMPT)
        assert second.flush()
        second = make_cache(tier)
        assert matched(second, PROMPT) >= 5 * PAGE
    assert matched(second, PROMPT) == len(PROMPT) - 1


def test_swapped_pages_are_not_taken_for_one_another(tier: MemoryTier) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    keys = list(tier.pages)
    tier.pages[keys[0]], tier.pages[keys[1]] = tier.pages[keys[1]], tier.pages[keys[0]]
    assert matched(second, PROMPT) == 0
    tier.pages[keys[0]], tier.pages[keys[1]] = tier.pages[keys[1]], tier.pages[keys[0]]
    one, other = tier.pages[keys[0]], tier.pages[keys[1]]
    one.parts, other.parts = other.parts, one.parts
    assert matched(make_cache(tier), PROMPT) == 0
    assert NAMESPACE.digest not in keys


def test_hiddens_that_are_not_finite_stay_out_of_tiers_that_cannot_hold_them(tier: MemoryTier) -> None:
    cache = make_cache(tier, hidden_codec="int8")
    chain = cache.open(NAMESPACE)
    kv, hidden = contents(PROMPT, 0)
    hidden[0][PAGE + 3, 1] = torch.inf
    cache.insert(chain, PROMPT, kv, hidden, EXACT)
    cache.close(chain)
    assert cache.flush()
    assert cache.stats().moved["unfit"] == 1
    assert matched(cache, PROMPT, EXACTLY) == len(PROMPT) - 1
    assert matched(make_cache(tier, hidden_codec="int8"), PROMPT) == PAGE


def test_a_reuse_mode_off_asks_nobody(tier: MemoryTier) -> None:
    asked: list[str] = []
    tier.before = asked.append
    cache = make_cache(tier)
    assert matched(cache, PROMPT, Reuse("off", None)) == 0
    assert cache.prefetch(PROMPT, NAMESPACE, Reuse("off", None), TOPOLOGY) == 0
    assert asked == []


def test_prefetch_brings_up_what_the_look_up_finds(tier: MemoryTier) -> None:
    first, second = make_cache(tier), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    assert second.prefetch(PROMPT, NAMESPACE, REPLAY, TOPOLOGY) == 6
    tier.closed = True
    assert matched(second, PROMPT) == len(PROMPT) - 1


def test_a_cache_that_was_shut_down_still_serves_from_host_memory(tier: MemoryTier) -> None:
    cache = make_cache(tier)
    store(cache, PROMPT)
    cache.shutdown()
    cache.shutdown()
    store(cache, [5] * 40)
    assert matched(cache, [5] * 40) == 39
    assert matched(cache, PROMPT) == len(PROMPT) - 1
    assert matched(cache, [6] * 40) == 0
    assert cache.flush(5.0)
    assert cache.stats().pinned == 0
    tier.closed = False
    assert matched(make_cache(tier), PROMPT) == len(PROMPT) - 1  # all was written before


def test_a_bug_in_a_tier_does_not_end_the_threads(tier: MemoryTier) -> None:
    first, second = make_cache(tier), make_cache(tier)

    def broken(method: str) -> None:
        raise ZeroDivisionError(method)

    tier.before = broken
    store(first, PROMPT)
    assert first.flush(10.0)
    assert matched(second, PROMPT) == 0
    tier.before = lambda method: None
    third = make_cache(tier)
    store(third, PROMPT)
    assert third.flush(10.0)
    assert matched(make_cache(tier), PROMPT) == len(PROMPT) - 1
    assert first.stats().pinned == second.stats().pinned == 0


def test_exact_mode_brings_up_nothing_that_it_cannot_use(tier: MemoryTier) -> None:
    first, second = make_cache(tier, hidden_codec="int8"), make_cache(tier)
    store(first, PROMPT)
    assert first.flush()
    assert matched(second, PROMPT, EXACTLY) == 0
    assert second.stats().pages == 0
    # Nor does it spoil exact pages that lack their hiddens.
    third = make_cache(tier, hidden_codec="int8")
    chain = third.open(NAMESPACE)
    kv, hidden = contents(PROMPT, 0)
    third.insert(chain, PROMPT, kv, hidden, EXACT)
    third.close(chain)
    assert third.flush()
    for page in third._tree.resident():
        third._tree._room.strip(page)
    assert matched(third, PROMPT, EXACTLY) == 0
    assert all(page.provenance.is_exact for page in third._tree.resident())
    plan = look_up(third, PROMPT)
    assert plan.matched == len(PROMPT) - 1
    third.release(plan)
