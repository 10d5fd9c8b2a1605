"""Hours of traffic through a small catalog: limits hold at every step, and memory does not grow.

``TAILREPLAY_SOAK_REQUESTS`` says how many requests for each setup; 20,000 take some minutes.
"""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice

import pytest

from tailreplay import writing
from tailreplay.bench.eviction_replay import Replayer
from tailreplay.bench.shape_costs import qwen35_4b
from tailreplay.bench.traces import Request, branching_agents, long_chats, shared_prompts
from tailreplay.catalog import Catalog
from tailreplay.chain import Chain
from tailreplay.eviction import Policy
from tailreplay.keys import tenant_of, token_bytes
from tailreplay.modes import parse_reuse
from tailreplay.policies import policy_of
from tailreplay.quotas import Quotas

REQUESTS = int(os.environ.get("TAILREPLAY_SOAK_REQUESTS", "2000"))
DISTINCT = 2000
PAGE, PAGES = 64, 400
COSTS = qwen35_4b()
PAGE_BYTES, HIDDEN_BYTES = PAGE * COSTS.page_bytes_per_token, PAGE * sum(COSTS.hidden_bytes)
TENANTS = ("alice", "bob", "")
SHARE = PAGES // 4
RESERVED = {tenant_of("alice"): SHARE * PAGE_BYTES}
LIMITS = {tenant_of("bob"): PAGES // 3 * PAGE_BYTES}


def traffic(seed: int) -> Iterator[Request]:
    """Every kind of trace, in any order, by three tenants."""
    rng = random.Random(seed)
    # Short conversations: it is their number that counts.
    kinds = [
        shared_prompts(DISTINCT, seed, prompts=40),
        branching_agents(DISTINCT, seed, agents=8, most=6_000),
        long_chats(DISTINCT, seed, users=20, most=6_000),
    ]
    while True:
        yield replace(next(rng.choice(kinds)), tenant=rng.choice(TENANTS))


class Soak:
    """Serves requests; some of them are given up, and some find damage."""

    def __init__(self, policy: Policy, hidden_share: float) -> None:
        quotas = Quotas(RESERVED, LIMITS)
        self.limit = PAGES * PAGE_BYTES
        self.catalog = Catalog(
            PAGE,
            self.limit,
            PAGE_BYTES,
            hidden_bytes=HIDDEN_BYTES,
            hidden_share=hidden_share,
            policy=policy,
            quotas=quotas,
        )
        self.replayer = Replayer(self.catalog, parse_reuse("replay"), COSTS)
        self.hits = 0
        self._rng = random.Random(1)

    def serve(self, request: Request) -> None:
        before = self._pages_of("alice")
        chance = self._rng.random()
        if chance < 0.05:
            self._give_up(request)
        elif chance < 0.07 and request.tenant != "alice":
            self._find_damage(request)
        else:
            self.replayer.serve(request)
        if request.tenant != "alice":
            assert self._pages_of("alice") >= min(before, SHARE)
        self.hits += sum(self.replayer.outcome.matched)
        del self.replayer.outcome.matched[:]  # it grows by design

    def check(self) -> None:
        """What holds at every moment at which nothing is under way."""
        catalog = self.catalog
        assert catalog.bytes_used <= self.limit
        assert catalog.pinned == 0
        assert catalog.pages <= catalog.slots
        assert catalog.namespaces <= len(TENANTS)

    def check_tenants(self) -> None:
        used = dict.fromkeys(TENANTS, 0)
        kv = PAGE_BYTES - HIDDEN_BYTES
        for page in self.catalog.resident(damaged=True):
            name = next(salt for salt in TENANTS if tenant_of(salt) == page.tenant)
            used[name] += kv + HIDDEN_BYTES * page.has_hidden
        assert sum(used.values()) == self.catalog.bytes_used
        assert used["bob"] <= LIMITS[tenant_of("bob")]

    def _pages_of(self, salt: str) -> int:
        tenant = tenant_of(salt)
        return sum(page.tenant == tenant for page in self.catalog.resident())

    def _give_up(self, request: Request) -> None:
        """An engine that fails after some pages were admitted."""
        plan, ids = self.replayer.look_up(request)
        namespace = self.replayer.namespace(request)
        page = plan.pages[plan.matched // PAGE - 1] if plan.matched >= PAGE else self.catalog.root(namespace)
        start = plan.matched // PAGE * PAGE
        self.catalog.pin((page,))
        chain = Chain(namespace, page, start)
        rest = (ids + token_bytes(request.output))[start * 4 :]
        writing.abort(self.catalog, writing.admit(self.catalog, chain, rest, plan.provenance, True))
        self.catalog.unpin((page,))
        self.catalog.unpin(plan.pages)

    def _find_damage(self, request: Request) -> None:
        """A load that meets pages whose bytes are wrong: the request is computed from its first token."""
        plan, _ = self.replayer.look_up(request)
        for page in plan.pages:
            if self._rng.random() < 0.2:
                self.catalog.condemn(page)
        self.catalog.unpin(plan.pages)
        self.replayer.serve(request)


def peaks(soak: Soak, requests: Iterator[Request], count: int) -> int:
    """Serve `count` requests and return the highest number of bytes of Python memory after any of them."""
    highest = 0
    for index in range(count):
        soak.serve(next(requests))
        soak.check()
        if index % 100 == 0:
            soak.check_tenants()
            gc.collect()
            highest = max(highest, tracemalloc.get_traced_memory()[0])
    return highest


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("policy", "hidden_share"), [("lru", 1.0), ("flops", 1.0), ("lru", 0.5)])
def test_limits_hold_and_memory_does_not_grow(policy: str, hidden_share: float) -> None:
    soak = Soak(policy_of(policy), hidden_share)
    # The same requests again and again: making new ones takes memory that is not the catalog's.
    requests = cycle(list(islice(traffic(7), min(DISTINCT, REQUESTS // 3))))
    tracemalloc.start()
    try:
        # The first part fills the catalog and brings heaps to the size that they keep.
        part = REQUESTS // 3
        peaks(soak, requests, REQUESTS - 2 * part)
        first, second = peaks(soak, requests, part), peaks(soak, requests, part)
    finally:
        tracemalloc.stop()
    assert second < 1.05 * first
    assert soak.hits > 0
    assert soak.catalog.evictions > PAGES
    soak.catalog.clear()
    assert (soak.catalog.pages, soak.catalog.bytes_used, soak.catalog.namespaces) == (0, 0, 0)
