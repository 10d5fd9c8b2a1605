"""The report of `tailreplay bench trace` as curves over time."""

from __future__ import annotations

from typing import Any


def draw(figure: Any, measured: dict[str, Any]) -> None:
    """Draw time to first token, shares of prompt tokens reused, and requests, each over time."""
    buckets = measured["over_time"]
    times = [each["from_s"] for each in buckets]
    latency, hits, requests = figure.subplots(3, 1, sharex=True)
    latency.plot(times, _values(buckets, "ttft_p50_ms"), marker="o", markersize=3, color="#4477aa")
    latency.set_ylabel("TTFT p50, ms")
    latency.set_ylim(bottom=0)
    hits.plot(times, _values(buckets, "ideal_share"), color="#bbbbbb", linewidth=4, label="an ideal cache")
    hits.plot(times, _values(buckets, "hit_share"), marker="o", markersize=3, color="#228833", label="the server")
    hits.set_ylabel("prompt tokens reused")
    hits.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    hits.set_ylim(0, 1)
    hits.legend(fontsize="small")
    requests.step(times, _values(buckets, "requests"), where="post", color="#4477aa", label="sent")
    requests.step(times, _values(buckets, "errors"), where="post", color="#cc3311", label="failed")
    requests.set_ylabel("requests")
    requests.set_xlabel("seconds")
    requests.set_ylim(bottom=0)
    requests.legend(fontsize="small")


def _values(buckets: list[dict[str, Any]], name: str) -> list[float]:
    return [float("nan") if each[name] is None else each[name] for each in buckets]
