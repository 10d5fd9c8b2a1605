"""Times of single runs, and the row of numbers that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tailreplay.ablation import ABLATIONS
from tailreplay.bench.numbers import percentile
from tailreplay.costs import CostModel
from tailreplay.topology import Group

PHASES = ("lookup", "fetch", "copy", "replay", "query")
"""Of a hit, in this order: what each holds is said in `ttft_report.text`."""


@dataclass(frozen=True)
class Sample:
    """One run: seconds to the first token, and of each phase where it was a hit."""

    total: float
    lookup: float = 0.0
    fetch: float = 0.0
    copy: float = 0.0
    replay: float = 0.0
    query: float = 0.0
    matched: int = 0
    replayed: int = 0


def rest_of(total: float, lookup: float, copy: float, replay: float, beside: bool) -> float:
    """Return the seconds of a hit that are in none of these parts, at least 0.

    Parameters
    ----------
    beside : bool
        Whether copies ran beside the replay: its time then holds the wait for them, so only the longer of the two counts.
    """
    return max(total - lookup - (max(copy, replay) if beside else copy + replay), 0.0)


def tails_of(groups: Sequence[Group], replayed: int) -> list[int]:
    """Return the tokens that each group replays where the longest tail is `replayed`.

    Groups of convolutions alone need no more than they can see; all others have the same tail.
    """
    return [min(replayed, replayed if group.receptive_field is None else group.receptive_field) for group in groups]


def row_of(
    costs: CostModel,
    length: int,
    query: int,
    ratio: float,
    ablation: str,
    full: Sequence[Sample],
    hits: Sequence[Sample],
    bandwidth: float,
) -> dict[str, Any]:
    """Return the numbers of one length, ratio and ablation; times are milliseconds.

    Parameters
    ----------
    full, hits : sequence of Sample
        At least one of each.
    bandwidth : float
        Bytes a second at which the machine copies from where pages lie to where the engine reads them.
    """
    matched, replayed = hits[-1].matched, hits[-1].replayed
    tails = tails_of(costs.topology.groups, replayed)
    full_flops = costs.prefill_flops(0, length + query)
    hit_flops = costs.hit_flops(matched, length + query, tails, ABLATIONS[ablation].skip)
    copy_bytes, loaded = matched * costs.kv_bytes, costs.hit_bytes(matched, tails)
    full_ms, hit_ms = _median([run.total for run in full]), _median([run.total for run in hits])
    return {
        "length": length,
        "query": query,
        "ratio": ratio,
        "ablation": ablation,
        "matched": matched,
        "replayed": replayed,
        **_spread("full", [run.total for run in full]),
        **_spread("hit", [run.total for run in hits]),
        "speedup": full_ms / hit_ms,
        "full_flops": full_flops,
        "hit_flops": hit_flops,
        "limit": full_flops / hit_flops,
        # The hit's time over that of its operations at the rate of the full prefill.
        "vs_limit": hit_ms / (hit_flops * full_ms / full_flops),
        "copy_bytes": copy_bytes,
        "copy_limit_ms": 1000 * copy_bytes / bandwidth,
        "loaded_bytes": loaded,
        "loaded_mib": loaded / 2**20,
        "load_limit_ms": 1000 * loaded / bandwidth,
        **{f"{phase}_ms": _median([getattr(run, phase) for run in hits]) for phase in PHASES},
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        f"{name}_ms": _median(seconds),
        f"{name}_mean_ms": round(1000 * fmean(seconds), 3),
        f"{name}_p95_ms": round(1000 * percentile(seconds, 0.95), 3),
        f"{name}_runs": len(seconds),
    }


def _median(seconds: Sequence[float]) -> float:
    return round(1000 * median(seconds), 3)
