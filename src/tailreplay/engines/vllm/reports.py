"""What a request and the metrics are told of a plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

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
        "miss_reason": plan.miss_reason,
        "stop": plan.stop,
        "source": "engine" if plan.matched and plan.matched == present else "tailreplay",
    }


def count(counts: Counter[str], plan: ReplayPlan) -> None:
    """Add a request's plan to the counts (see `stats.SERIES`). Mutates `counts`."""
    counts["prompt_tokens"] += plan.tokens
    counts["hit_tokens"] += plan.matched
    counts["replayed_tokens"] += plan.replayed
    counts[f"missed_tokens:{plan.miss_reason or plan.stop}"] += plan.tokens - plan.matched
    if plan.miss_reason:
        counts[f"miss:{plan.miss_reason}"] += 1
    else:
        counts["hit:exact" if plan.exact else "hit:approximate"] += 1
