"""Which page goes first by which policy."""

from __future__ import annotations

import pytest

from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.catalog import Catalog
from tailreplay.errors import CacheConfigError
from tailreplay.eviction import LeastRecentlyUsed
from tailreplay.keys import Namespace, token_bytes
from tailreplay.page import Page, root_page
from tailreplay.policies import PER_PAIR, PER_TOKEN, FlopAware, policy_of
from tailreplay.provenance import EXACT

PAGE = 16
NAMESPACE = Namespace("model", "layout", PAGE)


def page_at(start: int, tokens: int = PAGE, used: int = 0) -> Page:
    """A page of `tokens` tokens from position `start` on, used at tick `used`."""
    parent = root_page(b"root", 0, bytes(8))
    parent.start = start
    page = Page(b"key", token_bytes([1] * tokens), parent, 0, EXACT, 1)
    page.last_used = used
    return page


def store(catalog: Catalog, tokens: list[int]) -> None:
    """Store a sequence and pin nothing."""
    at = catalog.root(NAMESPACE)
    catalog.pin((at,))
    for start in range(0, len(tokens), PAGE):
        admission = catalog.admit(at, NAMESPACE, token_bytes(tokens[start : start + PAGE]), EXACT)
        assert admission.page is not None
        if admission.fill is not None:
            catalog.commit(admission.fill)
        catalog.unpin((at,))
        at = admission.page
    catalog.unpin((at,))


def matched(catalog: Catalog, tokens: list[int]) -> int:
    return catalog.match(token_bytes(tokens), NAMESPACE, limit=len(tokens)).tokens


def test_names_that_are_not_known_are_refused_with_those_that_are() -> None:
    assert isinstance(policy_of("lru"), LeastRecentlyUsed)
    assert policy_of("flops").name == "flops"
    assert policy_of("lru") is not policy_of("lru")
    with pytest.raises(CacheConfigError, match=r"one of lru, flops, got 'fifo'"):
        policy_of("fifo")


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, -1, 1), (1, 1, -0.5), (float("nan"), 1, 1)])
def test_costs_that_make_no_sense_are_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(CacheConfigError, match="positive costs"):
        FlopAware(*numbers)


def test_the_efficiency_is_counted_pair_by_pair() -> None:
    policy = FlopAware(per_token=100, per_pair=3, alpha=0.5)
    policy.sized(pages=40, page_size=PAGE)
    full = sum(100 + 3 * (at + 1) for at in range(PAGE))
    for start, tokens in ((0, PAGE), (0, 5), (320, PAGE), (320, 1)):
        flops = sum(100 + 3 * (at + 1) for at in range(start, start + tokens))
        assert policy.rank(page_at(start, tokens, used=7)) == pytest.approx(7 + 0.5 * 40 * flops / full)


def test_the_numbers_that_stand_for_any_model_are_near_those_of_a_real_one() -> None:
    costs = qwen35_4b()
    assert sum(layer.mixer + layer.ffn for layer in costs.layers) == pytest.approx(PER_TOKEN, rel=0.02)
    assert sum(layer.per_pair for layer in costs.layers) == pytest.approx(PER_PAIR, rel=0.02)
    given, typical = policy_of("flops", costs), policy_of("flops")
    for policy in (given, typical):
        policy.sized(100, PAGE)
    assert given.rank(page_at(32_000)) == pytest.approx(typical.rank(page_at(32_000)), rel=0.02)


def test_alpha_0_ranks_as_lru_does() -> None:
    policy = FlopAware(alpha=0)
    policy.sized(1000, PAGE)
    assert [policy.rank(page_at(start, tokens, 5)) for start, tokens in ((0, 1), (64_000, PAGE))] == [5, 5]


@pytest.mark.parametrize(("name", "left"), [("lru", "short"), ("flops", "long")])
def test_a_page_with_few_tokens_goes_before_one_that_saves_more(name: str, left: str) -> None:
    policy = policy_of("lru") if name == "lru" else FlopAware(alpha=1)
    catalog = Catalog(PAGE, limit_bytes=4, page_bytes=1, policy=policy)
    long, short = [1] * PAGE, [2] * 2
    store(catalog, long)  # used longest ago, and fullest
    store(catalog, short)
    for value in (3, 4):
        store(catalog, [value] * PAGE)
    store(catalog, [5] * PAGE)
    assert {"long": matched(catalog, long), "short": matched(catalog, short)} == (
        {"long": 0, "short": 2} if left == "short" else {"long": PAGE, "short": 0}
    )


def test_recency_wins_in_the_end() -> None:
    catalog = Catalog(PAGE, limit_bytes=4, page_bytes=1, policy=FlopAware(alpha=1))
    deep = [1] * (2 * PAGE)
    store(catalog, deep)
    for value in range(2, 12):
        store(catalog, [value] * PAGE)
    assert matched(catalog, deep) == 0
