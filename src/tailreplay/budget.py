"""How many tokens of a matched prefix to replay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tailreplay.errors import InvalidRequestError
from tailreplay.topology import Group


class Budget(Protocol):
    """Rule that chooses the tail length k of each group."""

    def tail(self, matched: int, group: Group) -> int:
        """Return k in [0, matched]: how many of the `matched` tokens' hiddens `group` replays."""
        ...


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
        if self.min_tokens < 0:
            raise InvalidRequestError(f"min_tokens must not be negative, got {self.min_tokens}.", "min_tokens")

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


def _within_field(wanted: int, matched: int, group: Group) -> int:
    return wanted if group.receptive_field is None else min(matched, group.receptive_field)
