"""How many tokens of a matched prefix to replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tailreplay.errors import InvalidRequestError
from tailreplay.forgetting import DEFAULT, Calibration, Forgetting, tail_errors
from tailreplay.topology import Group, Topology

GateReader = Callable[[int], Forgetting | None]
"""Returns what the last so many tokens of a match forget; None where that is not known."""


class Budget(Protocol):
    """Rule that chooses the tail length k of each group."""

    def tail(self, matched: int, group: Group) -> int:
        """Return k in [0, matched]: how many of the `matched` tokens' hiddens `group` replays."""
        ...


@dataclass(frozen=True, slots=True)
class Tails:
    """What a budget chose for a match.

    Attributes
    ----------
    tokens : tuple of int
        k of each group.
    predicted_error : float or None
        Greatest relative state error over layers, where the budget predicts it.
    note : str
        "" or why the budget did not do what it is for: "cut" (the error asked for would take a longer tail than allowed)
        or "no_gates" (the pages do not know what their tokens forget).
    """

    tokens: tuple[int, ...]
    predicted_error: float | None = None
    note: str = ""


def tails_of(budget: Budget, matched: int, topology: Topology, gates: GateReader) -> Tails:
    """Return the tails of all groups for a match of `matched` tokens."""
    if isinstance(budget, Adaptive):
        return budget.tails(matched, topology, gates)
    return Tails(tuple(budget.tail(matched, group) for group in topology.groups))


@dataclass(frozen=True)
class Ratio:
    """Replay the last ``ceil(r * m)`` tokens, the rule of the Tail-Replay paper (arXiv 2608.30310).

    Parameters
    ----------
    r : float
        Share of the matched prefix, in (0, 1].
    min_tokens : int
        Shortest tail. A match of at most this many tokens is replayed wholly, and so exactly.

    Raises
    ------
    InvalidRequestError
        If `r` is not a number in (0, 1].
    """

    r: float
    min_tokens: int = 64

    def __post_init__(self) -> None:
        valid = isinstance(self.r, (int, float)) and not isinstance(self.r, bool) and 0 < self.r <= 1
        if not valid:
            raise InvalidRequestError(f"The replay ratio must be a number in (0, 1], got {self.r!r}.", "ratio")
        if isinstance(self.min_tokens, bool) or not isinstance(self.min_tokens, int) or self.min_tokens < 0:
            raise InvalidRequestError(
                f"min_tokens must be a whole number and must not be negative, got {self.min_tokens!r}.", "min_tokens"
            )

    def tail(self, matched: int, group: Group) -> int:
        # Rounding first: in floating point 0.07 * 100 is a little more than 7 and would give 8.
        wanted = max(math.ceil(round(self.r * matched, 9)), self.min_tokens)
        return _within_field(min(matched, wanted), matched, group)


@dataclass(frozen=True)
class Exact:
    """Replay whatever makes the states exact: the whole prefix, or a conv-only group's receptive field."""

    def tail(self, matched: int, group: Group) -> int:
        return _within_field(matched, matched, group)


@dataclass(frozen=True)
class Zero:
    """Replay nothing: cached keys and values with zero states. A baseline that shows what replay does."""

    def tail(self, matched: int, group: Group) -> int:
        return 0


@dataclass(frozen=True)
class Adaptive:
    """Replay the shortest tail whose predicted state error is at most `error`, in each group on its own.

    The prediction (`tailreplay.forgetting`) is a bound for a group's first linear layer, and calibrated for deeper ones.
    Tails begin where pages do. Pages without gates, as they come from other engines, get `Ratio`'s tails.

    Parameters
    ----------
    error : float
        Greatest relative error ``||S^ - S|| / ||S||`` of any layer's recurrent state, in (0, 1].
    min_tokens : int
        Shortest tail. A match of at most this many tokens is replayed wholly, and so exactly.
    most : float
        Greatest share of the prefix that is replayed, in (0, 1]; the plan says when that is too little.
    fallback : float
        Ratio for pages without gates.
    calibration : Calibration
        Of the model; its defaults suit none in particular.

    Raises
    ------
    InvalidRequestError
        If a number is out of its range.
    """

    error: float = 0.05
    min_tokens: int = 64
    most: float = 0.25
    fallback: float = 0.05
    calibration: Calibration = DEFAULT

    def __post_init__(self) -> None:
        for name, value in (("error", self.error), ("most", self.most)):
            if not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1):
                what = "The state error" if name == "error" else "The greatest share to replay"
                raise InvalidRequestError(f"{what} must be a number in (0, 1], got {value!r}.", name)
        Ratio(self.fallback, self.min_tokens)  # its checks are ours

    def tail(self, matched: int, group: Group) -> int:
        """Return the tail of a prefix of which no gates are known."""
        return Ratio(self.fallback, self.min_tokens).tail(matched, group)

    def tails(self, matched: int, topology: Topology, gates: GateReader) -> Tails:
        """Return the tails of all groups, and the error that they are predicted to leave."""
        finite = all(group.receptive_field is not None for group in topology.groups)
        limit = min(matched, max(math.ceil(round(self.most * matched, 9)), self.min_tokens))
        if finite or matched <= self.min_tokens:
            return Tails(tuple(_within_field(matched, matched, group) for group in topology.groups), 0.0)
        forgetting = gates(limit)
        if forgetting is None:
            return self._without_gates(matched, topology)
        lengths = forgetting.tails
        errors = tail_errors(forgetting, topology, self.calibration)
        tokens, worst, note, row = [], 0.0, "", 0
        for group in topology.groups:
            mine = errors[:, row : row + len(group.stateful)].max(axis=1)
            row += len(group.stateful)
            allowed = lengths <= limit
            good = np.flatnonzero((mine <= self.error) & allowed)
            if len(good):
                # Of tails shorter than the shortest allowed one the last is taken, and lengthened: it only gets better.
                length, predicted = int(lengths[good[-1]]), float(mine[good[-1]])
            elif int(lengths[0]) < limit:
                return self._without_gates(matched, topology)
            else:
                length, note = limit, "cut"
                predicted = float(mine[np.flatnonzero(allowed)].min(initial=self.calibration.drift))
            tokens.append(_within_field(min(matched, max(length, self.min_tokens)), matched, group))
            worst = max(worst, predicted)
        return Tails(tuple(tokens), worst, note)

    def _without_gates(self, matched: int, topology: Topology) -> Tails:
        return Tails(tuple(self.tail(matched, group) for group in topology.groups), note="no_gates")


def _within_field(wanted: int, matched: int, group: Group) -> int:
    return wanted if group.receptive_field is None else min(matched, group.receptive_field)
