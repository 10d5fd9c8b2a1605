"""PrefixCache as it fills: room, better and longer pages, and failures while storing."""

from __future__ import annotations

import pytest
import torch

from tailreplay import Provenance
from tests.core.tiny import (
    EXACTLY,
    NAMESPACE,
    PAGE,
    assert_contents,
    contents,
    look_up,
    make_cache,
    matched,
    store,
)

APPROXIMATE = Provenance(1)
LONG = list(range(3 * PAGE + 5))


# ---- room


def test_full_when_everything_is_pinned() -> None:
    cache = make_cache(2)
    store(cache, LONG[: 2 * PAGE])
    plan = look_up(cache, LONG)
    chain = cache.open(NAMESPACE)
    tokens = [9] * (2 * PAGE)
    assert cache.insert(chain, tokens, *contents(tokens, 0), Provenance()) == 0
    assert chain.stopped == "full"
    cache.close(chain)
    assert cache.stats().refused == {"full": 1}
    assert_contents(cache.fetch(plan), plan, LONG)


def test_a_sequence_longer_than_the_cache_keeps_its_head() -> None:
    cache = make_cache(2)
    assert store(cache, LONG) == 2 * PAGE
    assert matched(cache, LONG) == 2 * PAGE


def test_the_limit_holds_and_the_least_recently_used_goes_first() -> None:
    cache = make_cache(3)
    prompts = [[value] * PAGE for value in range(3)]
    for tokens in prompts:
        store(cache, tokens)
    assert matched(cache, [*prompts[0], 9]) == PAGE
    store(cache, [8] * PAGE)
    assert [matched(cache, [*tokens, 9]) for tokens in prompts] == [PAGE, 0, PAGE]
    stats = cache.stats()
    assert stats.bytes_used <= stats.bytes_limit
    assert stats.evictions == 1


def test_clear_keeps_what_is_in_use() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    store(cache, [7] * 40)
    plan = look_up(cache, LONG[: PAGE + 3])
    cache.clear()
    assert cache.stats().pages == 2
    assert_contents(cache.fetch(plan), plan, LONG)
    cache.release(plan)
    cache.clear()
    assert (cache.stats().pages, cache.stats().bytes_used) == (0, 0)


# ---- better and longer pages


def test_an_exact_recomputation_replaces_approximate_pages() -> None:
    cache = make_cache(8)
    store(cache, LONG, provenance=APPROXIMATE)
    before = cache.stats().pages
    plan = look_up(cache, [*LONG, 0])
    assert (plan.exact, plan.provenance) == (False, APPROXIMATE)
    assert_contents(cache.fetch(plan), plan, LONG)
    cache.release(plan)
    assert matched(cache, [*LONG, 0], EXACTLY) == 0
    assert store(cache, LONG) == len(LONG)
    plan = look_up(cache, [*LONG, 0], EXACTLY)
    assert (plan.matched, plan.exact) == (len(LONG), True)
    assert_contents(cache.fetch(plan), plan, LONG)
    assert cache.stats().pages == before


def test_pages_are_not_replaced_by_worse_ones_or_while_they_are_read() -> None:
    cache = make_cache(8)
    store(cache, LONG)
    store(cache, LONG, provenance=APPROXIMATE)
    assert matched(cache, [*LONG, 0], EXACTLY) == len(LONG)

    cache = make_cache(8)
    store(cache, LONG, provenance=APPROXIMATE)
    plan = look_up(cache, [*LONG, 0])
    view = cache.fetch(plan)
    store(cache, LONG)
    assert_contents(view, plan, LONG)
    assert {page.provenance for page in plan.pages} == {APPROXIMATE}


def test_a_longer_page_supersedes_a_partial_one() -> None:
    cache = make_cache(8)
    for length in (3, 9, PAGE):
        store(cache, LONG[:length])
        assert cache.stats().pages == 1
        assert matched(cache, LONG) == length


def test_a_partial_page_in_use_is_superseded_once_it_is_released() -> None:
    # A chat's turn: its plan holds the last turn's partial page while the page that continues it is stored.
    cache = make_cache(8)
    store(cache, LONG[: PAGE + 3])
    plan = look_up(cache, LONG)
    store(cache, LONG[: 2 * PAGE], plan)
    assert cache.stats().pages == 3
    assert_contents(cache.fetch(plan), plan, LONG)
    cache.release(plan)
    assert cache.stats().pages == 2
    assert matched(cache, LONG) == 2 * PAGE


@pytest.mark.parametrize("provenance", [Provenance(), APPROXIMATE])
def test_tokens_that_a_longer_page_holds_are_covered(provenance: Provenance) -> None:
    cache = make_cache(8)
    store(cache, LONG[: PAGE + 9], provenance=provenance)
    chain = cache.open(NAMESPACE)
    tokens = LONG[: PAGE + 4]
    assert cache.insert(chain, tokens, *contents(tokens, 0, provenance.depth), provenance) == PAGE
    assert (chain.stopped, chain.tokens) == ("covered", PAGE)
    cache.close(chain)
    assert cache.stats().pages == 2
    assert cache.stats().refused == {"covered": 1}


def test_an_exact_partial_page_is_not_covered_by_an_approximate_one() -> None:
    cache = make_cache(8)
    store(cache, LONG[:9], provenance=APPROXIMATE)
    assert store(cache, LONG[:4]) == 4
    assert matched(cache, LONG, EXACTLY) == 4
    assert matched(cache, LONG) == 9


# ---- failures while storing


def test_a_failing_copy_leaves_nothing_behind() -> None:
    cache = make_cache(8)
    store(cache, LONG[:PAGE], provenance=APPROXIMATE)
    before = cache.stats()
    chain = cache.open(NAMESPACE)
    kv, _ = contents(LONG, 0)
    # Keys and values are copied; the hiddens have no data, so their copy raises.
    hidden = [torch.empty(len(LONG), 3, device="meta")]
    with pytest.raises(NotImplementedError):
        cache.insert(chain, LONG, kv, hidden, Provenance())
    assert (chain.tokens, cache.stats().pages, cache.stats().bytes_used) == (0, before.pages, before.bytes_used)
    plan = look_up(cache, LONG)
    assert plan.matched == PAGE
    assert_contents(cache.fetch(plan), plan, LONG)
    cache.release(plan)
    assert (chain.stopped, cache.stats().refused) == ("failed", {"failed": 1})
    cache.close(chain)
    assert cache.stats().pinned == 0
    assert store(cache, LONG) == len(LONG)
    plan = look_up(cache, [*LONG, 0], EXACTLY)
    assert_contents(cache.fetch(plan), plan, LONG)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("too few tokens", (len(LONG) - 1, 3), torch.float32),
        ("too many tokens", (len(LONG) + 1, 3), torch.float32),
        ("a shape that would broadcast", (len(LONG), 1), torch.float32),
        ("a dtype that would lose bits or pretend to have them", (len(LONG), 3), torch.bfloat16),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = make_cache(8)
    chain = cache.open(NAMESPACE)
    kv, _ = contents(LONG, 0)
    with pytest.raises(ValueError, match="h1"):
        cache.insert(chain, LONG, kv, [torch.zeros(shape, dtype=dtype)], Provenance())
    assert chain.stopped == "failed"
    cache.close(chain)
    assert cache.stats().pages == 0
    assert matched(cache, LONG) == 0


def test_a_missing_tensor_is_refused() -> None:
    cache = make_cache(8)
    chain = cache.open(NAMESPACE)
    kv, _ = contents(LONG, 0)
    with pytest.raises(ValueError, match="shorter"):
        cache.insert(chain, LONG, kv, [], Provenance())
    assert cache.stats().pages == 0
