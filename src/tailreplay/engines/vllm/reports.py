"""What a request and the metrics are told of a plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tailreplay.catalog import Catalog
from tailreplay.engines.vllm.stats import TIER
from tailreplay.plan import ReplayPlan


def report_of(plan: ReplayPlan, present: int) -> dict[str, Any]:
    """Return the ``tailreplay`` object of a response.

    Parameters
    ----------
    present : int
        Tokens that vLLM's own prefix cache had.
    """
    return {
        "matched": plan.matched,
        "replayed": plan.replayed,
        "mode": plan.mode,
        "ratio": plan.ratio,
        "exact": plan.exact,
        "provenance": str(plan.provenance),
        "depth": plan.provenance.depth,
        "start": str(plan.start),
        "anchor": plan.anchor.position if plan.anchor is not None else None,
        "miss_reason": plan.miss_reason,
        "stop": plan.stop,
        "short_tail": plan.short_tail,
        "source": "engine" if plan.matched and plan.matched == present else "tailreplay",
    }


class Tally:
    """Counts for the metrics (see `stats.SERIES`).

    Attributes
    ----------
    counts : Counter
        Since the start; some are seconds.
    """

    def __init__(self) -> None:
        self.counts: Any = Counter()
        self._taken: Any = Counter()
        self._approximate: list[str] = []

    def add(self, plan: ReplayPlan, name: str = "") -> None:
        """Count a request's plan.

        Parameters
        ----------
        name : str
            Of a request that is stored: it is told to whoever repairs what is approximate.
        """
        if name and plan.provenance.depth:
            self._approximate.append(name)
        counts = self.counts
        counts["prompt_tokens"] += plan.tokens
        counts["hit_tokens"] += plan.matched
        counts["replayed_tokens"] += plan.replayed
        counts[f"missed_tokens:{plan.miss_reason or plan.stop}"] += plan.tokens - plan.matched
        if plan.miss_reason:
            counts[f"miss:{plan.miss_reason}"] += 1
        else:
            counts["hit:exact" if plan.exact else "hit:approximate"] += 1
            counts[f"start:{plan.start}"] += 1
            counts["anchor_hits"] += plan.anchor is not None

    def take(self, catalog: Catalog, limit: int, anchor_bytes: int = 0, has_mean: bool = False) -> dict[str, Any]:
        """Return the counts since the last call, and the sizes now; empty if nothing happened.

        Parameters
        ----------
        anchor_bytes : int
            Of one anchor.
        has_mean : bool
            Whether there is a mean state.
        """
        anchors = catalog.anchors
        self.counts["anchors_stored"], self.counts["anchors_evicted"] = anchors.stored, anchors.evicted
        self.counts[f"evicted:{TIER}"] = catalog.evictions
        self.counts[f"stripped:{TIER}"] = catalog.stripped
        new = dict(self.counts - self._taken)
        self._taken = Counter(self.counts)
        sizes = {
            "bytes_used": catalog.bytes_used + anchors.used * anchor_bytes,
            "bytes_limit": limit,
            "pages": catalog.pages,
            "pinned": catalog.pinned,
            "anchors": anchors.used,
            "mean_state": int(has_mean),
        }
        approximate, self._approximate = self._approximate, []
        return {"counts": new, "sizes": sizes, "approximate": approximate} if new else {}
