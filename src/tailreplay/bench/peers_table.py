"""Rows and tables of `tailreplay bench peers`, from the records of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tailreplay.bench.numbers import percentile

NOT_REPORTED = "not reported"
HEADINGS = (
    "pattern", "server", "n", "prompt", "ideal", "reused", "share", "TTFT p50", "p95", "cold p50", "exact", "approx.",
)  # fmt: skip


def rows_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each pattern and server, over all repeats.

    Returns
    -------
    list of dict
        ``reused`` and ``ratio`` are None for a server that never says what it reused; a server that says it of some
        requests reused nothing in the others. ``ratio`` is None, too, where nothing could be reused. Times to first
        token are of the requests of which an ideal cache has something (``ttft``), and of the others (``cold``).
    """
    told = {record["server"] for record in records for request in record["requests"] if request["cached"] is not None}
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        cells.setdefault((record["pattern"], record["server"]), []).append(record)
    patterns = list(dict.fromkeys(pattern for pattern, _ in cells))
    return [
        _row(pattern, server, cells[pattern, server], server in told)
        for pattern in patterns
        for named, server in cells
        if named == pattern
    ]


def _row(pattern: str, server: str, records: Sequence[dict[str, Any]], told: bool) -> dict[str, Any]:
    requests = [request for record in records for request in record["requests"]]
    ideal = sum(request["ideal"] for request in requests)
    reused = sum(request["cached"] or 0 for request in requests) if told else None
    looked_up: Counter[str] = Counter()
    for record in records:
        looked_up.update(record["lookups"] or {})
    is_ours = any(record["lookups"] is not None for record in records)
    again = [request["ttft_ms"] for request in requests if request["ideal"]]
    cold = [request["ttft_ms"] for request in requests if not request["ideal"]]
    return {
        "pattern": pattern,
        "server": server,
        "requests": len(requests),
        "prompt": sum(request["prompt"] for request in requests),
        "ideal": ideal,
        "reused": reused,
        "ratio": reused / ideal if ideal and reused is not None else None,
        "ttft_p50_ms": median(again) if again else None,
        "ttft_p95_ms": percentile(again, 0.95) if again else None,
        "cold_p50_ms": median(cold) if cold else None,
        "exact": looked_up["hits:exact"] if is_ours else None,
        "approximate": looked_up["hits:approximate"] if is_ours else None,
        "misses": {name.removeprefix("misses:"): n for name, n in sorted(looked_up.items()) if name[0] == "m"},
    }


def table(rows: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the lines of the long table: a line a pattern and server; the pattern is named once."""
    lines: list[tuple[str, ...]] = []
    before = ""
    for row in rows:
        pattern, before = ("" if row["pattern"] == before else row["pattern"]), row["pattern"]
        lines.append(
            (
                pattern,
                row["server"],
                str(row["requests"]),
                f"{row['prompt']:,}",
                f"{row['ideal']:,}",
                NOT_REPORTED if row["reused"] is None else f"{row['reused']:,}",
                share(row),
                *(_number(row[name]) for name in ("ttft_p50_ms", "ttft_p95_ms", "cold_p50_ms")),
                *("" if row[name] is None else str(row[name]) for name in ("exact", "approximate")),
            )
        )
    return lines


def share(row: dict[str, Any]) -> str:
    """Return reused over ideal as text; where nothing can be reused, a dash."""
    if row["reused"] is None:
        return ""
    return "–" if row["ratio"] is None else f"{row['ratio']:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
