"""Short names of rows: only what tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailreplay.ablation import ABLATIONS

Row = dict[str, Any]

_PARTS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]).removesuffix(", random weights"),
    "engine": lambda row: str(row["engine"]),
    "dtype": lambda row: str(row["dtype"]),
    "query": lambda row: f"query {row['query']:,}",
    "ratio": lambda row: f"r = {percent(row['ratio'])}",
    "ablation": lambda row: ABLATIONS[row["ablation"]].label,
}
SERIES = tuple(_PARTS)
"""What rows of one curve have in common."""


def percent(ratio: float) -> str:
    """Return a share: ``5%``, ``0.5%``."""
    return f"{100 * ratio:g}%"


def short_length(tokens: int) -> str:
    """Return a length: ``8K``, ``1,000``."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def label(row: Row, rows: Sequence[Row], parts: Sequence[str] = SERIES) -> str:
    """Return those of a row's `parts` in which `rows` differ; the ratio if they differ in none."""
    told = [name for name in parts if len({str(other[name]) for other in rows}) > 1] or ["ratio"]
    return ", ".join(_PARTS[name](row) for name in told)


def series(rows: Sequence[Row], parts: Sequence[str] = SERIES) -> list[list[int]]:
    """Return the places of rows that agree in `parts`, curve by curve, each by length."""
    curves: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(rows):
        curves.setdefault(tuple(str(row[name]) for name in parts), []).append(place)
    return [sorted(places, key=lambda place: int(rows[place]["length"])) for places in curves.values()]
