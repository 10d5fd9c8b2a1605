"""Counters of the connector on vLLM's own /metrics."""

from __future__ import annotations

from typing import Any

from tailreplay.engines.vllm.compat import KVConnectorPromMetrics, KVConnectorStats
from tailreplay.engines.vllm.repair import note

# Name of the count (what follows a ":" is its label's value) -> series, help, label.
SERIES = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that were looked up.", None),
    "hit_tokens": ("hit_tokens", "Prompt tokens that were reused.", None),
    "replayed_tokens": ("replayed_tokens", "Reused tokens that ran through the linear layers again.", None),
    "missed_tokens": ("missed_tokens", "Prompt tokens that were computed, by why no more was reused.", "reason"),
    "hit": ("hits", "Requests that reused something, by what their states are.", "provenance"),
    "start": ("hit_starts", "Requests that reused something, by what their replay began with.", "start"),
    "anchor_hits": ("anchor_hits", "Requests whose replay began with saved states.", None),
    "anchors_stored": ("anchors_stored", "Saved states that were stored.", None),
    "anchors_evicted": ("anchors_evicted", "Saved states that made room for others.", None),
    "damaged_anchors": ("damaged_anchors", "Saved states whose bytes were not what was stored.", None),
    "miss": ("misses", "Requests that reused nothing, by why.", "reason"),
    "refused": ("refused_pages", "Pages that were not stored, by why.", "reason"),
    "evicted": ("evicted_pages", "Pages that made room for others.", "tier"),
    "damaged_pages": ("damaged_pages", "Pages whose bytes were not what was stored.", None),
    "fetched_pages": ("fetched_pages", "Pages brought up from tiers below host memory.", None),
    "written_pages": ("written_pages", "Pages written to tiers below host memory, by every rank.", None),
    "unwritten_pages": ("unwritten_pages", "Pages that could not be written there, or were evicted before.", None),
    "late_tiers": ("late_tiers", "Requests that went on since tiers below took too long.", None),
    "stripped": ("stripped_pages", "Pages whose hiddens made room for others'.", "tier"),
    "preemptions": ("preemptions", "Requests that gave up their blocks and began again.", None),
    "bad_params": ("bad_params", "Requests whose tailreplay parameters were ignored since they were wrong.", None),
    "calibrations": ("calibrations", "Mean states that were made of the model.", None),
    "load_seconds": ("load_seconds", "Time spent copying cached keys and values into place.", None),
    "replay_seconds": ("replay_seconds", "Time spent replaying.", None),
}
GAUGES = {
    "bytes_used": ("cache_bytes", "Bytes of cached pages and saved states."),
    "bytes_limit": ("cache_limit_bytes", "Hard limit of that, of each rank."),
    "pages": ("cache_pages", "Cached pages."),
    "anchors": ("cache_anchors", "Saved states."),
    "mean_state": ("mean_state", "Whether tails may begin with the model's mean state."),
    "pinned": ("cache_pinned_pages", "Pages that a request needs now."),
}
TIER = "host"


class TailReplayStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last interval in ``data["counts"]``, sizes now in ``data["sizes"]``. Crosses processes.

    ``data["approximate"]`` names the requests since then that went on from approximate states.
    """

    def reset(self) -> None:
        """Forget the counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: TailReplayStats) -> TailReplayStats:
        """Add another interval's counts; its sizes are newer."""
        counts = dict(self.data.get("counts", {}))
        for name, value in other.data.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + value
        sizes = other.data.get("sizes") or self.data.get("sizes", {})
        approximate = [*self.data.get("approximate", ()), *other.data.get("approximate", ())]
        return TailReplayStats({"counts": counts, "sizes": sizes, "approximate": approximate})

    def reduce(self) -> dict[str, int | float]:
        """Return what the periodic log line shows."""
        counts = self.data.get("counts", {})
        shown = {name: counts.get(name, 0) for name in ("prompt_tokens", "hit_tokens", "replayed_tokens")}
        exact = counts.get("hit:exact", 0)
        hits = exact + counts.get("hit:approximate", 0)
        return {**shown, "exact_hit_share": round(exact / hits, 3) if hits else 0.0}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data.get("counts")


class TailReplayPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers the series of `SERIES` and `GAUGES` under ``vllm:tailreplay_``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:tailreplay_{series}",
                documentation=text,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (series, text, label) in SERIES.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:tailreplay_{series}", documentation=text, labelnames=[*labelnames, "tier"]
            )
            for name, (series, text) in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts and show the sizes."""
        note(transfer_stats_data.get("approximate", ()))
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.get("counts", {}).items():
            series, _, reason = name.partition(":")
            self._counters[series].labels(*labels, *([reason] if reason else [])).inc(value)
        for name, value in transfer_stats_data.get("sizes", {}).items():
            self._gauges[name].labels(*labels, TIER).set(value)
