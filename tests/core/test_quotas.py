"""Shares of tenants: nobody loses what is reserved, exceeds a limit, or is refused room that another could give."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailreplay.catalog import Catalog
from tailreplay.errors import CacheConfigError
from tailreplay.keys import Namespace, tenant_of, token_bytes
from tailreplay.page import Page
from tailreplay.provenance import EXACT
from tailreplay.quotas import Quotas, Shares, parse_shares

PAGE, KV, HIDDEN = 16, 60, 40
SALTS = ("", "a", "b", "c")
TENANTS = {salt: tenant_of(salt) for salt in SALTS}
PLACES = {salt: Namespace("model", "layout", PAGE, salt=salt) for salt in SALTS}


def make(
    pages: int, reserved: dict[str, int] | None = None, limits: dict[str, int] | None = None, share: float = 1.0
) -> Catalog:
    """A catalog with room for `pages` pages; reserved shares and limits are in bytes."""
    limit = int(pages * (KV + share * HIDDEN))
    quotas = Quotas(parse_shares(reserved or {}), parse_shares(limits or {}))
    return Catalog(PAGE, limit, KV + HIDDEN, hidden_bytes=HIDDEN, hidden_share=share, quotas=quotas)


def store(
    catalog: Catalog, salt: str, *values: int, when_refused: Callable[[], None] = lambda: None
) -> tuple[list[Page], str]:
    """Store one page a value, each after the one before, and pin none. Returns what is there, and why it is not all."""
    parent = catalog.root(PLACES[salt])
    catalog.pin((parent,))
    pages: list[Page] = []
    reason = ""
    for value in values:
        admission = catalog.admit(parent, PLACES[salt], token_bytes([value] * PAGE), EXACT)
        if admission.page is None:
            reason = admission.reason
            when_refused()
            break
        if admission.fill is not None:
            catalog.commit(admission.fill)
        catalog.unpin((parent,))
        parent = admission.page
        pages.append(parent)
    catalog.unpin((parent,))
    return pages, reason


def held(catalog: Catalog, salt: str) -> int:
    return sum(page.tenant == TENANTS[salt] for page in catalog.resident(damaged=True))


def hiddens(catalog: Catalog, salt: str) -> int:
    return sum(page.tenant == TENANTS[salt] and page.has_hidden for page in catalog.resident(damaged=True))


# ---- what is refused


def test_shares_that_come_to_more_than_the_limit_are_refused() -> None:
    make(10, {"a": 500, "b": 500})
    with pytest.raises(CacheConfigError, match=r"come to 1001 B, more than the limit of 1000 B"):
        make(10, {"a": 500, "b": 501})


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    make(10, limits={"a": 100})
    with pytest.raises(CacheConfigError, match=r"limit of 99 B is smaller than one page"):
        make(10, limits={"a": 99})
    make(10, {"a": 300}, {"a": 300})
    with pytest.raises(CacheConfigError, match=r"limit of 299 B is smaller than what is reserved for it"):
        make(10, {"a": 300}, {"a": 299})


def test_shares_are_read_as_people_write_them_and_keep_no_salt() -> None:
    assert parse_shares({"alice": "2KiB", "": 7}) == {tenant_of("alice"): 2048, bytes(8): 7}
    with pytest.raises(CacheConfigError, match="not a size"):
        parse_shares({"alice": "much"})


def test_each_pool_is_divided_alike_and_limits_hold_in_bytes() -> None:
    a, b = TENANTS["a"], TENANTS["b"]
    kv, hidden = Quotas({a: 500}, {b: 250}).divide(10, 10, KV, HIDDEN)
    assert [shares.may_take(b, a) for shares in (kv, hidden)] == [False, False]
    for shares, reserved, limit in ((kv, 5, 2), (hidden, 5, 2)):
        shares.add(a, reserved)
        assert not shares.may_take(b, a)
        assert shares.may_take(a, a)
        shares.add(a, 1)
        assert shares.may_take(b, a)
        shares.add(b, limit - 1)
        assert shares.fits(b)
        shares.add(b, 1)
        assert not shares.fits(b)
        assert shares.fits(a)


@given(st.integers(1, 200), st.integers(1, 100), st.integers(0, 100), st.floats(0.05, 1), st.integers(0, 10_000))
def test_slots_of_a_limit_never_come_to_more_bytes(slots: int, kv: int, hidden: int, share: float, size: int) -> None:
    hidden_slots = max(1, int(slots * share))
    size = max(size, kv + hidden)
    for shares, other in zip(
        Quotas(limits={b"t": size}).divide(slots, hidden_slots, kv, hidden), (kv, hidden), strict=True
    ):
        while shares.fits(b"t") and shares.used[b"t"] < 300:
            shares.add(b"t", 1)
        size -= shares.used[b"t"] * other if shares.used[b"t"] < 300 else 0
        assert shares.used[b"t"] >= 1
    assert size >= 0


def test_a_counter_forgets_tenants_that_have_left() -> None:
    shares = Shares()
    shares.add(b"t", 2)
    shares.add(b"t", -2)
    assert not shares.used
    assert shares.fits(b"t")
    assert not shares.named


# ---- what tenants do to each other, by hand


def test_traffic_of_others_takes_what_exceeds_a_share_and_no_more() -> None:
    catalog = make(10, {"a": 400})
    store(catalog, "a", *range(8))
    for value in range(100, 130):
        store(catalog, "b", value)
    assert held(catalog, "a") == 4
    assert held(catalog, "b") == 6


def test_a_tenant_comes_to_its_share_however_full_the_cache_is() -> None:
    catalog = make(10, {"a": 400, "b": 600})
    store(catalog, "b", *range(10))
    for value in range(100, 120):
        pages, reason = store(catalog, "a", value)
        assert (len(pages), reason) == (1, "")
    assert (held(catalog, "a"), held(catalog, "b")) == (4, 6)


def test_at_its_limit_a_tenant_evicts_only_its_own() -> None:
    catalog = make(10, limits={"a": 300})
    store(catalog, "b", *range(7))
    for value in range(100, 120):
        assert store(catalog, "a", value)[1] == ""
        assert held(catalog, "b") == 7
        assert held(catalog, "a") <= 3
    assert catalog.bytes_used == 1000


def test_at_its_limit_with_all_pinned_a_tenant_finds_no_room_though_others_have_some() -> None:
    catalog = make(10, limits={"a": 300})
    pages, _ = store(catalog, "a", 1, 2, 3)
    catalog.pin(pages)
    assert store(catalog, "a", 9)[1] == "full"
    assert store(catalog, "b", 9)[1] == ""
    catalog.unpin(pages)


def test_others_do_not_take_all_hiddens_of_a_tenant_with_keys_to_spare() -> None:
    # 100 pages, 25 of them with hiddens. Counted in bytes, "a" would exceed its share by its keys and values alone for as
    # long as "b" takes its hiddens, and be left without any.
    catalog = make(100, {"a": 3500, "b": 3500}, share=0.25)
    for value in range(100):
        store(catalog, "a", value)
    assert (held(catalog, "a"), hiddens(catalog, "a")) == (100, 25)
    for value in range(100, 150):
        store(catalog, "b", value)
        assert hiddens(catalog, "a") >= 12
    assert (held(catalog, "a"), held(catalog, "b")) == (50, 50)
    assert hiddens(catalog, "b") >= 12


def test_a_small_share_has_a_hidden_at_least() -> None:
    catalog = make(100, limits={"a": 210}, share=0.125)
    store(catalog, "a", 1, 2, 3)
    assert hiddens(catalog, "a") == 1
    assert catalog.bytes_used <= 210


# ---- many random traces


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(4, 16),
    share=st.sampled_from([0.25, 0.5, 1.0]),
    parts=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
    limited=st.sampled_from([None, "a", "c"]),
)
def test_no_tenant_ever_loses_its_share_to_another(
    seed: int, pages: int, share: float, parts: tuple[int, int, int], limited: str | None
) -> None:
    """After every step: limits hold, and whoever is not writing has no less than before or than its share."""
    per_page = KV + share * HIDDEN
    reserved = {salt: int(pages * per_page * part / 16) for salt, part in zip("abc", parts, strict=True) if part}
    least = max(int(pages * per_page / 3), KV + HIDDEN, reserved.get(limited or "", 0))
    limits = {limited: least} if limited else {}
    catalog = make(pages, reserved, limits, share)
    total = catalog.slots * KV + catalog.hidden_slots * HIDDEN
    shares = {
        salt: (size * catalog.slots // total, size * catalog.hidden_slots // total) for salt, size in reserved.items()
    }
    rng = random.Random(seed)
    pinned: list[list[Page]] = []
    for _ in range(60):
        writer = rng.choice(SALTS)
        before = {salt: (held(catalog, salt), hiddens(catalog, salt)) for salt in SALTS}
        values = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
        nobody_can = partial(_nobody_can_give, catalog, writer, shares, limits)
        stored, _ = store(catalog, writer, *values, when_refused=nobody_can)
        assert catalog.bytes_used <= pages * per_page
        for salt in limits:
            assert held(catalog, salt) * KV + hiddens(catalog, salt) * HIDDEN <= limits[salt]
        for salt in set(SALTS) - {writer}:
            now = held(catalog, salt), hiddens(catalog, salt)
            kept = shares.get(salt, (0, 0))
            assert now[0] >= min(before[salt][0], kept[0])
            # Hiddens go with a page beyond the share, but are never taken from one that stays.
            lost_pages = before[salt][0] - now[0]
            assert now[1] >= min(before[salt][1], kept[1]) - lost_pages
        _now_and_then_pin(catalog, rng, pinned, stored)


def _now_and_then_pin(catalog: Catalog, rng: random.Random, pinned: list[list[Page]], stored: list[Page]) -> None:
    if stored and rng.random() < 0.2:
        catalog.pin(stored, 0)
        pinned.append(stored)
    if pinned and rng.random() < 0.3:
        catalog.unpin(pinned.pop(rng.randrange(len(pinned))))


def _nobody_can_give(catalog: Catalog, writer: str, shares: dict[str, tuple[int, int]], limits: dict[str, int]) -> None:
    """Check that every page that may go is one that the writer must not take: it had to be refused."""
    for page in catalog.resident():
        if page.is_evictable:
            owner = next(salt for salt in SALTS if TENANTS[salt] == page.tenant)
            assert owner != writer
            at_limit = writer in limits and (held(catalog, writer) + 1) * (KV + HIDDEN) > limits[writer]
            assert at_limit or held(catalog, owner) <= shares.get(owner, (0, 0))[0]
