"""Tables as text in rows and columns, before a terminal or HTML gives them a look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailreplay.evals.statistics import Estimate

NOTHING = "–"


@dataclass(frozen=True)
class Grid:
    """One table; the first column names the row."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """Tables under one heading, with a sentence on how to read them."""

    title: str
    text: str
    grids: tuple[Grid, ...]


def setting_lines(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of a run as names and texts; lists and mappings become words with commas."""
    return [(str(name), _words(value)) for name, value in settings.items()]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 2) -> str:
    """Return a difference with its sign; one that rounds to zero has none."""
    if value is None:
        return NOTHING
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in percent."""
    return NOTHING if value is None else f"{100 * value:.{digits}f}%"


def plus_minus(estimate: Estimate, digits: int = 2) -> str:
    """Return a value and half of its interval."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return number(estimate.value, digits)
    return f"{estimate.value:.{digits}f} ±{(estimate.high - estimate.low) / 2:.{digits}f}"


def percent_interval(estimate: Estimate) -> str:
    """Return a share and its interval, in percent."""
    if estimate.low is None or estimate.high is None:
        return percent(estimate.value)
    return f"{percent(estimate.value)} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def filled(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the rows that say something beyond their name."""
    return tuple(row for row in rows if any(text != NOTHING for text in row[1:]))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(entry)}" for name, entry in value.items())
    return ", ".join(_words(entry) for entry in value) if isinstance(value, list | tuple) else str(value)
