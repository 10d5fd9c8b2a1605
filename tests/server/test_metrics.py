"""Series by themselves, without a server."""

from __future__ import annotations

import pytest

from tailreplay.cache_stats import CacheStats
from tailreplay.metrics import Metrics


def rendered(refused: dict[str, int]) -> str:
    metrics = Metrics()
    metrics.watch_cache(lambda: CacheStats(0, 0, 0, 1024, 0, refused))
    return metrics.render().decode()


@pytest.mark.parametrize(
    ("series", "values"),
    [
        (
            'requests_total{outcome="%s"}',
            ["completed", "cancelled", "failed", "invalid", "unauthorized", "queue_full", "closing"],
        ),
        ('hits_total{provenance="%s"}', ["exact", "approximate"]),
        (
            'misses_total{reason="%s"}',
            [
                "unseen_prefix",
                "below_min_match",
                "only_approximate_pages",
                "prompt_too_short",
                "load_failed",
                "off",
            ],
        ),
        ('cache_refused_total{reason="%s"}', ["full", "covered", "busy", "failed"]),
    ],
)
def test_known_series_are_there_before_their_first_event(series: str, values: list[str]) -> None:
    lines = rendered({}).splitlines()
    for value in values:
        assert f"tailreplay_{series % value} 0.0" in lines


def test_refusals_are_counted_by_reason() -> None:
    lines = rendered({"full": 3, "other": 1}).splitlines()
    assert 'tailreplay_cache_refused_total{reason="full"} 3.0' in lines
    assert 'tailreplay_cache_refused_total{reason="other"} 1.0' in lines
    assert 'tailreplay_cache_refused_total{reason="busy"} 0.0' in lines
