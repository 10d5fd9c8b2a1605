"""What a cache is told of storage: by Python, by flags, by a configuration file."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tailreplay import CacheConfigError, PrefixCache, Storage, TailReplayError
from tailreplay.commands.storage_flags import add_flags, storage_settings
from tailreplay.keys import tenant_of
from tailreplay.storage import parse_storage
from tests.core.tiny import LAYOUT, NAMESPACE, PAGE, TOPOLOGY, contents, look_up, matched, store


def flags(*given: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return storage_settings(parser.parse_args(list(given)))


def test_nothing_said_is_host_memory_alone() -> None:
    assert flags() == {}
    assert parse_storage({}) == Storage()
    assert Storage().open() == []


def test_flags_become_settings() -> None:
    settings = flags(
        "--tier", "disk", "--tier", "redis://h", "--hidden-codec", "none", "--hidden-share", "0.5", "--policy", "flops",
        "--reserve", "a=b=1MiB", "--tenant-limit", "c=2MiB", "--tier-deadline", "1.5",
    )  # fmt: skip
    assert settings == {
        "tiers": ["disk", "redis://h"],
        "hidden_codec": "none",
        "hidden_share": 0.5,
        "policy": "flops",
        "reserved": {"a=b": "1MiB"},
        "limits": {"c": "2MiB"},
        "deadline": 1.5,
    }
    quotas = parse_storage(settings).quotas()
    assert (quotas.reserved, quotas.limits) == ({tenant_of("a=b"): 1 << 20}, {tenant_of("c"): 2 << 20})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--reserve", "alice"), "--reserve is SALT=SIZE"),
        (("--reserve", "=1GiB"), "--reserve is SALT=SIZE"),
        (("--reserve", "a=1", "--reserve", "a=2"), "once a salt"),
        (("--tenant-limit", "a=much"), "much"),
        (("--hidden-share", "0"), r"hidden_share must be a number in \(0, 1\]"),
        (("--hidden-share", "nan"), r"hidden_share must be a number in \(0, 1\]"),
        (("--tier-deadline", "0"), "deadline of tiers must be a positive number"),
        (("--tier-deadline", "inf"), "deadline of tiers must be a positive number"),
        (("--policy", "fifo"), "lru, flops"),
    ],
)
def test_wrong_flags_are_one_sentence(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(TailReplayError, match=message) as caught:
        flags(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tiers": "disk"}, "must be a list of addresses"),
        ({"tiers": [3]}, "must be a list of addresses"),
        ({"hidden_codec": "int4"}, "must be one of none, int8, fp8_e4m3"),
        ({"host_codec": None}, "must be one of none, int8, fp8_e4m3"),
        ({"hidden_share": True}, "hidden_share"),
        ({"hidden_share": "half"}, "hidden_share"),
        ({"reserved": ["a"]}, "must map salts to sizes"),
        ({"limits": {"a": "x"}}, "x"),
        ({"deadline": -1}, "deadline"),
        ({"policy": 7}, "lru, flops"),
    ],
)
def test_wrong_settings_are_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheConfigError, match=message) as caught:
        parse_storage(given).quotas()
    assert "\n" not in str(caught.value)


def test_a_cache_keeps_tenants_shares_and_fewer_hiddens_than_pages() -> None:
    pages = 24
    storage = Storage(hidden_share=0.5, reserved={"tenant": 8 * LAYOUT.page_bytes}, policy="flops")
    cache = PrefixCache(pages * LAYOUT.page_bytes, page_size=PAGE, storage=storage)
    cache.bind(LAYOUT)
    ours = NAMESPACE.__class__("model", LAYOUT.digest, PAGE, salt="tenant")
    store(cache, list(range(4 * PAGE)), namespace=ours)
    for number in range(20):
        store(cache, [1000 + number, *range(3 * PAGE)])
    stats = cache.stats()
    assert stats.evictions > 0
    assert stats.stripped > 0
    assert stats.bytes_used <= stats.bytes_limit
    assert stats.tokens_limit > pages * PAGE  # more pages fit than with all their hiddens
    plan = cache.lookup(list(range(4 * PAGE)), ours, parse_exact(), TOPOLOGY)
    assert plan.matched == 4 * PAGE - 1, "nobody pushed the tenant out"
    cache.release(plan)


def parse_exact() -> Any:
    from tailreplay.modes import parse_reuse

    return parse_reuse("exact")


def test_damage_in_host_memory_is_found_and_computed_again() -> None:
    cache = PrefixCache(16 * LAYOUT.page_bytes, page_size=PAGE)
    cache.bind(LAYOUT)
    prompt = list(range(5 * PAGE))
    store(cache, prompt)
    plan = look_up(cache, prompt)
    slot = plan.pages[2].slot
    cache.release(plan)
    part = LAYOUT.kv_parts[0]
    arena = cache._arena
    assert arena is not None
    arena.rows(part, slot, 1).view(-1)[0] ^= 1
    assert matched(cache, prompt) == 2 * PAGE
    assert cache.stats().damaged == 1
    store(cache, prompt)
    assert matched(cache, prompt) == len(prompt) - 1
    assert contents(prompt, 0)
