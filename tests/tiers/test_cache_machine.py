"""Caches over tiers that fail: nothing wrong is ever served, limits hold, nothing hangs, and it recovers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tailreplay.cache import PrefixCache
from tailreplay.keys import Namespace
from tailreplay.modes import parse_reuse
from tailreplay.provenance import EXACT
from tailreplay.storage import Storage
from tailreplay.tiers.base import PARTS
from tailreplay.tiers.guard import Guarded
from tests.core.tiny import LAYOUT, PAGE, TOPOLOGY, contents
from tests.tiers.faulty_tier import FAULTS, FaultyTier

DEADLINE = 0.05
NAMESPACES = (
    Namespace("model", LAYOUT.digest, PAGE),
    Namespace("model", LAYOUT.digest, PAGE, salt="tenant"),
    Namespace("another", LAYOUT.digest, PAGE),
)
# int8 keeps these numbers to within a 127th of the largest of a token.
ERROR = 1 / 120
runs = st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([5, 16, 17, 32, 48])), min_size=1, max_size=4)
namespaces = st.sampled_from([0, 0, 0, 1, 2])
which = st.integers(0, 1)


def expand(pieces: list[tuple[int, int]]) -> list[int]:
    return [value for value, count in pieces for _ in range(count)]


class CacheMachine(RuleBasedStateMachine):
    """Two caches that share two tiers, one of which each may fail at any time."""

    prompts = Bundle("prompts")

    def __init__(self) -> None:
        super().__init__()
        self.tiers = [FaultyTier(1 << 16), FaultyTier(1 << 20)]
        self.now = 0.0
        self.codec = "none"
        self.caches: list[PrefixCache] = []

    @initialize(
        target=prompts,
        pieces=st.lists(runs, min_size=2, max_size=2),
        codec=st.sampled_from(["none", "int8"]),
        share=st.sampled_from([1.0, 0.3]),
    )
    def start(self, pieces: list[list[tuple[int, int]]], codec: str, share: float) -> Any:
        self.codec, self.share = codec, share
        self.caches = [self.open(), self.open()]
        return multiple(*map(expand, pieces))

    def open(self) -> PrefixCache:
        guarded = [Guarded(tier, DEADLINE, clock=lambda: self.now) for tier in self.tiers]
        storage = Storage(guarded, hidden_codec=self.codec, hidden_share=self.share)
        cache = PrefixCache(9 * LAYOUT.page_bytes, page_size=PAGE, storage=storage)
        cache.bind(LAYOUT)
        return cache

    # ---- what requests do

    @rule(target=prompts, base=prompts, cut=st.integers(0, 100), pieces=runs)
    def branch(self, base: list[int], cut: int, pieces: list[tuple[int, int]]) -> list[int]:
        return [*base[:cut], *expand(pieces)][:120]

    @rule(cache=which, prompt=prompts, namespace=namespaces, mode=st.sampled_from(["replay", "exact", "zero"]))
    def ask(self, cache: int, prompt: list[int], namespace: int, mode: str) -> None:
        """Look a prompt up, check all that its plan needs, and store what it lacks."""
        self.request(self.caches[cache], prompt, namespace, mode)

    def request(self, cache: PrefixCache, prompt: list[int], namespace: int, mode: str = "replay") -> int:
        where = NAMESPACES[namespace]
        plan = cache.lookup(prompt, where, parse_reuse(mode, min_tokens=16), TOPOLOGY)
        try:
            if plan.matched:
                self.check(cache, plan, prompt, namespace)
            chain = cache.open(where, plan)
            # Contents tell namespaces apart; what a lossy page is followed by is lossy, too.
            kv, hidden = contents(prompt, chain.tokens, namespace)
            cache.insert(chain, prompt[chain.tokens :], kv, hidden, EXACT)
            cache.close(chain)
        finally:
            cache.release(plan)
        return plan.matched

    def check(self, cache: PrefixCache, plan: Any, prompt: list[int], namespace: int) -> None:
        m = plan.matched
        assert m < len(prompt)
        view = cache.fetch(plan)
        keys, values = torch.empty(m, 1, 2), torch.empty(m, 1, 2)
        view.keys_values(0, keys, values)
        [(k, v)], [h] = contents(prompt[:m], 0, namespace)
        torch.testing.assert_close((keys, values), (k, v), rtol=0, atol=0)
        got = torch.empty(m - plan.tail_start, 3)
        view.hidden(0, plan.tail_start, m, got)
        lossy = plan.provenance.lossy
        assert not (lossy and plan.exact)
        assert not (lossy and self.codec == "none")
        torch.testing.assert_close(got, h[plan.tail_start :], rtol=ERROR if lossy else 0, atol=0)

    @rule(cache=which, prompt=prompts, namespace=namespaces)
    def prefetch(self, cache: int, prompt: list[int], namespace: int) -> None:
        self.caches[cache].prefetch(prompt, NAMESPACES[namespace], parse_reuse("replay"), TOPOLOGY)

    @rule(cache=which)
    def flush(self, cache: int) -> None:
        assert self.caches[cache].flush(20.0), "nothing may keep pages from being written or given up"

    @rule(cache=which)
    def clear(self, cache: int) -> None:
        self.caches[cache].clear()

    @rule(cache=which)
    def restart(self, cache: int) -> None:
        self.caches[cache].shutdown()
        self.caches[cache] = self.open()

    # ---- what goes wrong

    @rule(tier=which, fault=st.sampled_from(FAULTS))
    def break_down(self, tier: int, fault: str) -> None:
        self.tiers[tier].mend()
        self.tiers[tier].break_down(fault)

    @rule(tier=which)
    def mend(self, tier: int) -> None:
        self.tiers[tier].mend()
        self.now += 61.0

    @rule(tier=which, index=st.integers(0, 50), part=st.sampled_from([*PARTS, None]))
    def lose(self, tier: int, index: int, part: str | None) -> None:
        keys = list(self.tiers[tier].pages)
        if keys:
            page = self.tiers[tier].pages[keys[index % len(keys)]]
            if part is None:
                del self.tiers[tier].pages[keys[index % len(keys)]]
            else:
                page.parts.pop(part, None)

    @rule(tier=which, index=st.integers(0, 50), at=st.integers(0, 1 << 12), part=st.sampled_from([*PARTS, "header"]))
    def damage(self, tier: int, index: int, at: int, part: str) -> None:
        for page in list(self.tiers[tier].pages.values())[index:][:1]:
            data = bytearray(page.header if part == "header" else page.parts.get(part, b""))
            if data:
                data[at % len(data)] ^= 16
                if part == "header":
                    page.header = bytes(data)
                else:
                    page.parts[part] = bytes(data)

    # ---- what must always hold

    @invariant()
    def limits_hold_and_nothing_stays_pinned(self) -> None:
        for cache in self.caches:
            stats = cache.stats()
            assert stats.bytes_used <= stats.bytes_limit
        for tier in self.tiers:
            assert sum(page.nbytes for page in list(tier.pages.values())) <= tier.limit

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.mend()
        self.now += 100.0
        for cache in self.caches:
            assert cache.flush(20.0)
            assert cache.stats().pinned == 0
        if self.caches:
            # It works again: what one stores the other finds.
            prompt = [7] * 40
            self.now += 100.0
            self.request(self.caches[0], prompt, 0)
            assert self.caches[0].flush(20.0)
            assert self.request(self.caches[1], prompt, 0) == len(prompt) - 1
        for cache in self.caches:
            cache.shutdown()


def test_nothing_wrong_is_ever_served() -> None:
    machine = CacheMachine.TestCase
    machine.settings = settings(
        max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine().runTest()
