"""Methods that are compared: how the linear layers' states come about after a hit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tailreplay.errors import InvalidRequestError
from tailreplay.modes import Reuse, parse_reuse

FULL, ZERO, WIPED, EXACT = "full", "zero", "kv-wiped", "exact"
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_REPLAY = "replay@"
_RANKS = {FULL: 0, EXACT: 1, ZERO: 3, WIPED: 4}
_REPLAY_RANK = 2


@dataclass(frozen=True)
class Method:
    """A way to answer after a hit.

    Attributes
    ----------
    name : str
        "full" (everything computed), "zero" (keys and values reused, states zero), "replay@0.05" …, "exact", or "kv-wiped"
        (an ablation: the true states, all keys and values gone).
    reuse : Reuse or None
        What is asked of the cache; None where the states are those of the full prefill.
    """

    name: str
    reuse: Reuse | None

    @property
    def wiped(self) -> bool:
        """Whether keys and values are taken away."""
        return self.name == WIPED


def parse_method(name: str, min_tail: int = 0) -> Method:
    """Return a method by name.

    Parameters
    ----------
    min_tail : int
        Shortest tail of "replay"; the paper has none.

    Raises
    ------
    InvalidRequestError
        If there is no such method, or r is outside (0, 1].
    """
    if name in (FULL, WIPED):
        return Method(name, None)
    if name in (ZERO, EXACT):
        return Method(name, parse_reuse(name))
    try:
        if not name.startswith(_REPLAY):
            raise ValueError
        ratio = float(name.removeprefix(_REPLAY))
    except ValueError:
        known = f"{FULL}, {ZERO}, {_REPLAY}R with R in (0, 1], {EXACT}, {WIPED}"
        raise InvalidRequestError(f"There is no method {name!r}; there are {known}.") from None
    return Method(f"{_REPLAY}{ratio:g}", parse_reuse("replay", ratio, min_tail))


def parse_methods(names: list[str], min_tail: int = 0) -> list[Method]:
    """Return methods by name, each once; "full", "zero" and "kv-wiped", which every table needs, come with them."""
    wanted = [parse_method(name, min_tail) for name in [FULL, ZERO, *names, WIPED]]
    return list({method.name: method for method in wanted}.values())


DEFAULT = [f"{_REPLAY}{ratio:g}" for ratio in RATIOS]


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
