"""Names of the methods that are compared, and their order in every report."""

from __future__ import annotations

from collections.abc import Iterable

FULL = "full"
EXACT = "exact"
ZERO = "zero"
WIPED = "kv-wiped"
_REPLAY = "replay@"
_RANKS = {FULL: 0, EXACT: 1, ZERO: 3, WIPED: 4}
_REPLAY_RANK = 2


def ratio_of(method: str) -> float | None:
    """Return the share of the prefix that `method` replays; None if its name gives none."""
    return float(method.removeprefix(_REPLAY)) if method.startswith(_REPLAY) else None


def is_ablation(method: str) -> bool:
    """Return whether `method` is there to check the tasks, not to be used."""
    return method == WIPED


def ordered(methods: Iterable[str]) -> tuple[str, ...]:
    """Return each method once: full, exact, replay from the largest share down, zero, the ablation, others."""
    return tuple(sorted(set(methods), key=_place))


def label(method: str) -> str:
    """Return the method's name for people."""
    ratio = ratio_of(method)
    if ratio is not None:
        return f"replay {100 * ratio:g}%"
    return {ZERO: "zero states", WIPED: "KV wiped (ablation)"}.get(method, method)


def _place(method: str) -> tuple[int, float, str]:
    ratio = ratio_of(method)
    return (_REPLAY_RANK, -ratio, method) if ratio is not None else (_RANKS.get(method, len(_RANKS)), 0.0, method)
