"""Modes of reuse, and how a request names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tailreplay.budget import Adaptive, Budget, Exact, Ratio, Zero
from tailreplay.errors import InvalidRequestError

Mode = Literal["replay", "exact", "zero", "off"]
DEFAULT_RATIO = 0.05


@dataclass(frozen=True)
class Reuse:
    """What a request wants of the cache.

    Attributes
    ----------
    mode : {"replay", "exact", "zero", "off"}
        "replay" is approximate and matches any page, "exact" matches only exact pages and rebuilds exact states,
        "zero" is the baseline without any replay, "off" neither looks up nor reuses.
    budget : Budget or None
        Chooses the tail; None for "off".
    buckets : tuple of int
        Tail lengths that the engine is quick at, in ascending order: in "replay" mode a tail is lengthened to the next of
        them where the match and its hiddens reach that far. None by default. More tokens only make the states better.
    """

    mode: Mode
    budget: Budget | None
    buckets: tuple[int, ...] = ()

    @property
    def ratio(self) -> float | None:
        """The ratio r of "replay" mode, else None."""
        return self.budget.r if isinstance(self.budget, Ratio) else None


def parse_reuse(mode: Any = "replay", ratio: Any = None, min_tokens: int = 64, error: Any = None) -> Reuse:
    """Build a `Reuse` from a request's own words.

    Parameters
    ----------
    mode : str
        One of `Mode`.
    ratio : float, optional
        Share of the prefix to replay, for "replay" only; 0.05 if not given.
    min_tokens : int
        Shortest tail of "replay".
    error : float, optional
        Relative state error to replay for, instead of a ratio; for "replay" only (see `tailreplay.budget.Adaptive`).

    Raises
    ------
    InvalidRequestError
        If the mode is unknown, the ratio or the error is outside (0, 1], both are given, or either with another mode.
    """
    if mode not in get_args(Mode):
        raise InvalidRequestError(f"The reuse mode must be one of {', '.join(get_args(Mode))}, got {mode!r}.", "mode")
    if error is not None:
        if mode != "replay":
            raise InvalidRequestError(f"A state error goes with mode 'replay' only, not with {mode!r}.", "error")
        if ratio is not None:
            raise InvalidRequestError("Give either a ratio or a state error, not both.", "error")
        return Reuse("replay", Adaptive(error, min_tokens))
    if mode == "replay":
        return Reuse("replay", Ratio(DEFAULT_RATIO if ratio is None else ratio, min_tokens))
    if ratio is not None:
        raise InvalidRequestError(f"A ratio goes with mode 'replay' only, not with {mode!r}.", "ratio")
    if mode == "exact":
        return Reuse("exact", Exact())
    return Reuse("zero", Zero()) if mode == "zero" else Reuse("off", None)


def parse_replay(replay: Any, min_tokens: int = 64) -> Reuse:
    """Build a `Reuse` from the Python API's one argument.

    That is a ratio like ``0.05``, a mode like ``"exact"``, a budget like ``Adaptive(error=0.05)``, or a `Reuse`.
    """
    if isinstance(replay, Reuse):
        return replay
    if isinstance(replay, (Ratio, Adaptive)):
        return Reuse("replay", replay)
    if isinstance(replay, str):
        return parse_reuse(replay, min_tokens=min_tokens)
    return parse_reuse("replay", replay, min_tokens)
