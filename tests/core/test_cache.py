"""PrefixCache: what is stored comes back, and nothing else ever does."""

from __future__ import annotations

import pytest
import torch

from tailreplay import CacheConfigError, InvalidRequestError, Namespace, PrefixCache, Provenance
from tailreplay.modes import parse_reuse
from tailreplay.pages import PageLayout, PartSpec
from tailreplay.plan import without_reuse
from tests.core.tiny import (
    EXACTLY,
    LAYOUT,
    NAMESPACE,
    PAGE,
    TOPOLOGY,
    assert_contents,
    contents,
    look_up,
    make_cache,
    matched,
    store,
)

APPROXIMATE = Provenance(1)
LONG = list(range(3 * PAGE + 5))


# ---- sizes and layouts


@pytest.mark.parametrize("size", ["nothing", "", "-1GiB", 0, -5, "8 parsecs"])
def test_bad_sizes_are_refused(size: int | str) -> None:
    with pytest.raises(CacheConfigError):
        PrefixCache(size)


@pytest.mark.parametrize("page_size", [0, -16, 8, 17])
def test_page_sizes_are_multiples_of_16(page_size: int) -> None:
    with pytest.raises(CacheConfigError, match="multiple of 16"):
        PrefixCache("1MiB", page_size=page_size)


def test_another_layout_is_refused() -> None:
    cache = make_cache(4)
    cache.bind(LAYOUT)
    other = PageLayout(PAGE, LAYOUT.kv, (PartSpec("h1", (4,), torch.float32),))
    with pytest.raises(CacheConfigError, match="another layout"):
        cache.bind(other)


def test_a_layout_of_another_page_size_is_refused() -> None:
    cache = PrefixCache("1MiB", page_size=32)
    with pytest.raises(CacheConfigError, match="32"):
        cache.bind(LAYOUT)


def test_a_limit_below_one_page_is_refused_and_one_page_is_enough() -> None:
    cache = PrefixCache(LAYOUT.page_bytes - 1, page_size=PAGE)
    with pytest.raises(CacheConfigError, match="smaller than one page"):
        cache.bind(LAYOUT)
    with pytest.raises(RuntimeError, match="no page layout"):
        look_up(cache, LONG)
    assert store(make_cache(1), LONG[:PAGE]) == PAGE


def test_an_unbound_cache_says_so_and_has_stats() -> None:
    cache = PrefixCache("1MiB", page_size=PAGE)
    with pytest.raises(RuntimeError, match="attach a model"):
        cache.open(NAMESPACE)
    cache.clear()
    assert cache.stats().bytes_limit == 2**20
    assert cache.stats().pages == 0


# ---- round trips


@pytest.mark.parametrize("length", [1, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 5])
def test_what_is_stored_comes_back(length: int) -> None:
    cache = make_cache(8)
    tokens = LONG[:length]
    assert store(cache, tokens) == length
    plan = look_up(cache, [*tokens, 999])
    assert plan.matched == length
    assert_contents(cache.fetch(plan), plan, tokens)
    cache.release(plan)


def test_a_hit_may_end_inside_a_page() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    prompt = [*LONG[: PAGE + 7], 999, 998]
    plan = look_up(cache, prompt)
    assert (plan.matched, len(plan.pages), plan.stop) == (PAGE + 7, 2, "diverged")
    assert_contents(cache.fetch(plan), plan, prompt)


def test_one_token_is_left_to_run() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    assert matched(cache, LONG) == len(LONG) - 1
    assert matched(cache, LONG[:PAGE]) == PAGE - 1


def test_hiddens_are_read_from_any_token_to_any() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    plan = look_up(cache, [*LONG, 0])
    view = cache.fetch(plan)
    _, [want] = contents(LONG, 0)
    for start, stop in [(0, 1), (PAGE - 1, PAGE + 1), (5, 3 * PAGE + 2), (3 * PAGE + 5, 3 * PAGE + 5)]:
        out = torch.empty(stop - start, 3)
        view.hidden(0, start, stop, out)
        assert torch.equal(out, want[start:stop])


def test_a_sequence_stored_in_pieces_equals_one_stored_at_once() -> None:
    cache = make_cache(8)
    chain = cache.open(NAMESPACE)
    for stop in (PAGE, 3 * PAGE, len(LONG)):
        kv, hidden = contents(LONG[:stop], chain.tokens)
        assert cache.insert(chain, LONG[chain.tokens : stop], kv, hidden, Provenance())
        # Before the sequence has ended, others can use what there is.
        assert matched(cache, [*LONG[:stop], 999]) == stop
    assert chain.stopped == "partial"
    assert cache.insert(chain, [1], *contents([1], 0), Provenance()) == 0
    cache.close(chain)
    plan = look_up(cache, [*LONG, 0])
    assert_contents(cache.fetch(plan), plan, LONG)


def test_a_hit_is_continued_after_its_last_full_page() -> None:
    cache = make_cache(12)
    store(cache, LONG)
    longer = [*LONG[: 2 * PAGE + 3], *range(500, 540)]
    plan = look_up(cache, longer)
    chain = cache.open(NAMESPACE, plan)
    assert chain.tokens == 2 * PAGE
    cache.close(chain)
    store(cache, longer, plan)
    cache.release(plan)
    for tokens in (LONG, longer):
        plan = look_up(cache, [*tokens, 999])
        assert plan.matched == len(tokens)
        assert_contents(cache.fetch(plan), plan, tokens)


def test_forks_go_on_apart() -> None:
    cache = make_cache(12)
    chain = cache.open(NAMESPACE)
    trunk = LONG[: 2 * PAGE]
    cache.insert(chain, trunk, *contents(trunk, 0), Provenance())
    twin = cache.fork(chain)
    endings = {0: [*trunk, 100, 101], 1: [*trunk, 200, 201, 202]}
    for each, tokens in zip((chain, twin), endings.values(), strict=True):
        cache.insert(each, tokens[len(trunk) :], *contents(tokens, len(trunk)), Provenance())
        cache.close(each)
    assert [matched(cache, [*tokens, 999]) for tokens in endings.values()] == [len(each) for each in endings.values()]
    assert cache.stats().pinned == 0


def test_a_fork_of_a_closed_chain_holds_nothing() -> None:
    cache = make_cache(4)
    chain = cache.open(NAMESPACE)
    cache.insert(chain, LONG[:PAGE], *contents(LONG[:PAGE], 0), Provenance())
    cache.close(chain)
    twin = cache.fork(chain)
    assert cache.insert(twin, [1], *contents([1], 0), Provenance()) == 0
    cache.close(twin)
    assert cache.stats().pinned == 0


@pytest.mark.parametrize(
    "other",
    [
        Namespace("other", LAYOUT.digest, PAGE),
        Namespace("model", LAYOUT.digest, PAGE, salt="tenant"),
        Namespace("model", LAYOUT.digest, PAGE, adapter="lora"),
        Namespace("model", LAYOUT.digest, PAGE, images=("cat",)),
    ],
)
def test_namespaces_share_nothing(other: Namespace) -> None:
    cache = make_cache(8)
    store(cache, LONG)
    assert matched(cache, LONG, namespace=other) == 0
    assert look_up(cache, LONG, namespace=other).miss_reason == "unseen_prefix"


# ---- misses


def test_mode_off_reuses_nothing() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    plan = look_up(cache, LONG, parse_reuse("off"))
    assert (plan.matched, plan.miss_reason) == (0, "off")


@pytest.mark.parametrize("tokens", [[], [0]])
def test_short_prompts_are_misses(tokens: list[int]) -> None:
    cache = make_cache(8)
    store(cache, LONG)
    assert look_up(cache, tokens).miss_reason == "prompt_too_short"


def test_matches_below_min_match_are_misses() -> None:
    cache = make_cache(8, min_match=10)
    store(cache, LONG)
    plan = look_up(cache, LONG[:10])
    assert (plan.matched, plan.pages, plan.miss_reason) == (0, (), "below_min_match")
    assert matched(cache, LONG[:11]) == 10


def test_bad_token_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        look_up(make_cache(1), [1, -1])


def test_exact_mode_says_when_only_approximate_pages_match() -> None:
    cache = make_cache(8)
    store(cache, LONG, provenance=APPROXIMATE)
    for length in (PAGE // 2, 2 * PAGE):
        plan = look_up(cache, LONG[:length], EXACTLY)
        assert (plan.matched, plan.miss_reason, plan.stop) == (0, "only_approximate_pages", "approximate")


def test_the_topology_decides_the_tails() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    plan = cache.lookup(LONG, NAMESPACE, parse_reuse("replay", 0.5, min_tokens=1), TOPOLOGY)
    assert plan.tails == (26, 26), "ceil(0.5 * 52) in both groups"
    assert not plan.exact


# ---- leases


def test_releasing_twice_unpins_once() -> None:
    cache = make_cache(2)
    store(cache, LONG[: 2 * PAGE])
    first, second = look_up(cache, LONG), look_up(cache, LONG)
    cache.release(first)
    cache.release(first)
    assert cache.stats().pinned == 2
    assert store(cache, [7] * PAGE) == 0, "the second plan still needs every page"
    assert_contents(cache.fetch(second), second, LONG)
    cache.release(second)
    assert cache.stats().pinned == 0
    assert store(cache, [7] * PAGE) == PAGE


def test_a_released_plan_can_be_neither_fetched_nor_continued() -> None:
    cache = make_cache(4)
    store(cache, LONG[: 2 * PAGE])
    plan = look_up(cache, LONG)
    cache.release(plan)
    with pytest.raises(RuntimeError, match="released"):
        cache.fetch(plan)
    with pytest.raises(RuntimeError, match="released"):
        cache.open(NAMESPACE, plan)
    # Without its pages, the same request is stored from its first token.
    chain = cache.open(NAMESPACE, without_reuse(plan, "load_failed"))
    assert chain.tokens == 0
    cache.close(chain)


def test_a_plan_of_another_cache_cannot_be_fetched() -> None:
    cache, other = make_cache(4), make_cache(4)
    for each in (cache, other):
        store(each, LONG[: 2 * PAGE])
    with pytest.raises(RuntimeError, match="another cache"):
        other.fetch(look_up(cache, LONG))


def test_closing_twice_unpins_once() -> None:
    cache = make_cache(4)
    first, second = cache.open(NAMESPACE), cache.open(NAMESPACE)
    cache.insert(first, LONG[:PAGE], *contents(LONG[:PAGE], 0), Provenance())
    cache.insert(second, LONG[:PAGE], *contents(LONG[:PAGE], 0), Provenance())
    cache.close(first)
    cache.close(first)
    assert cache.stats().pinned == 1
    cache.close(second)
    assert cache.stats().pinned == 0
