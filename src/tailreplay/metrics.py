"""Prometheus counters and the reasons behind them, rendered by a server's ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("completed", "cancelled", "failed", "invalid", "unauthorized", "queue_full", "closing")
MISS_REASONS = (
    "unseen_prefix",
    "below_min_match",
    "only_approximate_pages",
    "no_hiddens",
    "prompt_too_short",
    "load_failed",
    "off",
)
REFUSALS = ("full", "covered", "busy", "failed")
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class CacheSnapshot(Protocol):
    """What a cache tells of itself; pages and bytes now, evictions and refusals since the start.

    `refused` counts by reason the sequences that it did not store to their end, `moved` what went to lower tiers and came
    from them, as "what:tier" or "what".
    """

    @property
    def pages(self) -> int: ...
    @property
    def pinned(self) -> int: ...
    @property
    def bytes_used(self) -> int: ...
    @property
    def bytes_limit(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def refused(self) -> dict[str, int]: ...
    @property
    def stripped(self) -> int: ...
    @property
    def damaged(self) -> int: ...
    @property
    def moved(self) -> dict[str, int]: ...


class Metrics:
    """All metrics of one server, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by outcome", "outcome")
        self._prompt = self._counter("prompt_tokens", "Tokens of answered prompts")
        self._hit = self._counter("hit_tokens", "Prompt tokens reused from the cache")
        self._replayed = self._counter("replayed_tokens", "Reused tokens that ran through the linear layers again")
        self._generated = self._counter("generated_tokens", "Tokens sampled")
        self._hits = self._counter("hits", "Prompts that reused something, by what was rebuilt", "provenance")
        self._misses = self._counter("misses", "Prompts that reused nothing, by reason", "reason")
        self._ttft = Histogram(
            "tailreplay_time_to_first_token_seconds",
            "Wait in the queue and time to the first token, of each prompt",
            registry=self.registry,
            buckets=_TTFT_BUCKETS,
        )
        # A series that appears with its first event has no rate at that event: name the known ones now.
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for provenance in ("exact", "approximate"):
            self._hits.labels(provenance)
        for reason in MISS_REASONS:
            self._misses.labels(reason)

    def request(self, outcome: str) -> None:
        """Count a request; `outcome` is one of `OUTCOMES`."""
        self._requests.labels(outcome).inc()

    def prompt(self, tokens: int, matched: int, replayed: int, *, exact: bool, miss_reason: str) -> None:
        """Count how one prompt met the cache; `miss_reason` is one of `MISS_REASONS`, or "" on a hit."""
        self._prompt.inc(tokens)
        if miss_reason:
            self._misses.labels(miss_reason).inc()
            return
        self._hit.inc(matched)
        self._replayed.inc(replayed)
        self._hits.labels("exact" if exact else "approximate").inc()

    def answer(self, tokens: int, first_token_seconds: float) -> None:
        """Count one answer of at least one token."""
        self._generated.inc(tokens)
        self._ttft.observe(first_token_seconds)

    def watch_queue(self, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        """Read the queue's state at each `render`."""
        for name, text, read in (
            ("queue_length", "Requests that wait", waiting),
            ("running", "Requests that run now", running),
        ):
            Gauge(f"tailreplay_{name}", text, registry=self.registry).set_function(read)

    def watch_cache(self, snapshot: Callable[[], CacheSnapshot]) -> None:
        """Read the cache's state at each `render`."""
        self.registry.register(_CacheCollector(snapshot))

    def render(self) -> bytes:
        """Return all metrics in the text format of `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tailreplay_{name}", text, labels, registry=self.registry)


class _CacheCollector(Collector):
    """Asks the cache when it is scraped, so that nothing has to be kept in step."""

    def __init__(self, snapshot: Callable[[], CacheSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        for name, text, value in (
            ("pages", "Pages in the cache", now.pages),
            ("pinned_pages", "Pages that running requests need", now.pinned),
            ("bytes", "Bytes of the pages", now.bytes_used),
            ("limit_bytes", "Limit of the bytes", now.bytes_limit),
        ):
            yield GaugeMetricFamily(f"tailreplay_cache_{name}", text, value)
        yield CounterMetricFamily("tailreplay_cache_evictions", "Pages evicted", now.evictions)
        yield CounterMetricFamily("tailreplay_cache_stripped", "Pages whose hiddens were evicted", now.stripped)
        damaged = now.damaged + now.moved.get("damaged", 0) + now.moved.get("passed_over", 0)
        yield CounterMetricFamily("tailreplay_cache_damaged", "Pages dropped since their bytes were wrong", damaged)
        moved = CounterMetricFamily(
            "tailreplay_tier", "Pages and bytes moved, and calls by how they ended, by tier", labels=["what", "tier"]
        )
        for name, count in sorted(now.moved.items()):
            what, _, tier = name.partition(":")
            moved.add_metric([what, tier], count)
        yield moved
        text = "Sequences not stored to their end, by reason"
        refused = CounterMetricFamily("tailreplay_cache_refused", text, labels=["reason"])
        for reason, count in {**dict.fromkeys(REFUSALS, 0), **now.refused}.items():
            refused.add_metric([reason], count)
        yield refused
