"""Methods that are compared: how the linear layers' states come about after a hit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tailreplay.errors import InvalidRequestError
from tailreplay.evals.start_rules import ANCHOR_INTERVAL, KINDS, Start, name_of, parse_start
from tailreplay.modes import Reuse, parse_reuse

FULL, ZERO, WIPED, EXACT = "full", "zero", "kv-wiped", "exact"
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_REPLAY = "replay@"
_RANKS = {FULL: 0, EXACT: 1, ZERO: 4, WIPED: 5}
_REPLAY_RANK, _START_RANK = 2, 3


@dataclass(frozen=True)
class Method:
    """A way to answer after a hit.

    Attributes
    ----------
    name : str
        "full" (everything computed), "zero" (keys and values reused, states zero), "replay@0.05" …, "exact", or "kv-wiped"
        (an ablation: the true states, all keys and values gone), or one of `tailreplay.evals.start_rules`.
    reuse : Reuse or None
        What is asked of the cache; None where the states are those of the full prefill, or come about by `start`.
    start : Start or None
        How the states come about where they start otherwise than in the paper.
    """

    name: str
    reuse: Reuse | None
    start: Start | None = None

    @property
    def rebuilds(self) -> bool:
        """Whether the states are rebuilt: they may differ from the full prefill's."""
        return self.reuse is not None or self.start is not None

    @property
    def wiped(self) -> bool:
        """Whether keys and values are taken away."""
        return self.name == WIPED


def parse_method(name: str, min_tail: int = 0, interval: int = ANCHOR_INTERVAL) -> Method:
    """Return a method by name.

    Parameters
    ----------
    min_tail : int
        Shortest tail; the paper has none.
    interval : int
        Tokens between anchors, where the name does not say where the anchor lies.

    Raises
    ------
    InvalidRequestError
        If there is no such method, or r is outside (0, 1].
    """
    if name in (FULL, WIPED):
        return Method(name, None)
    if name in (ZERO, EXACT):
        return Method(name, parse_reuse(name))
    start = parse_start(name, min_tail, interval)
    if start is not None:
        return Method(name_of(start, told="/" in name), None, start)
    try:
        if not name.startswith(_REPLAY):
            raise ValueError
        ratio = float(name.removeprefix(_REPLAY))
    except ValueError:
        others = "carried@R, decayed@R, mean@R, mixed@R, blended@R, recompute@R, anchored"
        known = f"{FULL}, {ZERO}, {_REPLAY}R with R in (0, 1], {EXACT}, {WIPED}, {others}"
        raise InvalidRequestError(f"There is no method {name!r}; there are {known}.") from None
    return Method(f"{_REPLAY}{ratio:g}", parse_reuse("replay", ratio, min_tail, start="zero"))


def parse_methods(names: list[str], min_tail: int = 0, interval: int = ANCHOR_INTERVAL) -> list[Method]:
    """Return methods by name, each once; "full", "zero" and "kv-wiped", which every table needs, come with them."""
    wanted = [parse_method(name, min_tail, interval) for name in [FULL, ZERO, *names, WIPED]]
    return list({method.name: method for method in wanted}.values())


DEFAULT = [f"{_REPLAY}{ratio:g}" for ratio in RATIOS]


def ratio_of(method: str) -> float | None:
    """Return the share of the prefix that `method` replays; None if its name gives none."""
    return float(method.removeprefix(_REPLAY)) if method.startswith(_REPLAY) else None


def is_ablation(method: str) -> bool:
    """Return whether `method` is there to check the tasks, not to be used."""
    return method == WIPED


def ordered(methods: Iterable[str]) -> tuple[str, ...]:
    """Return each method once: full, exact, replay from the largest share down, other starts, zero, the ablation."""
    return tuple(sorted(set(methods), key=_place))


def label(method: str) -> str:
    """Return the method's name for people."""
    ratio = ratio_of(method)
    if ratio is not None:
        return f"replay {100 * ratio:g}%"
    return {ZERO: "zero states", WIPED: "KV wiped (ablation)"}.get(method, method)


def _place(method: str) -> tuple[int, float, str]:
    ratio = ratio_of(method)
    if ratio is not None:
        return _REPLAY_RANK, -ratio, method
    started = method.split("@")[0].split("/")[0] in KINDS
    return _START_RANK if started else _RANKS.get(method, len(_RANKS)), 0.0, method
