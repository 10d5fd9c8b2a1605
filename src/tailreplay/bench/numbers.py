"""Numbers that benchmarks report."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed.

    Parameters
    ----------
    values : sequence of float
        At least one, in any order.
    share : float
        Above 0 and at most 1: 0.99 for the 99th percentile.
    """
    ordered = sorted(values)
    # Rounded first: 0.99 * 100 is a little more than 99 in binary.
    rank = -int(-round(share * len(ordered), 9) // 1)
    return ordered[max(rank, 1) - 1]


def during(gaps: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the lengths of the gaps that share some time with one of `spans`."""
    return [end - begin for begin, end in gaps if any(begin < last and first < end for first, last in spans)]
