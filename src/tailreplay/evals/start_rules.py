"""From which states a tail starts, and where the anchor lies that they come from: plain rules, without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tailreplay.budget import Ratio
from tailreplay.errors import InvalidRequestError

ANCHORED, CARRIED, DECAYED, RECOMPUTE = "anchored", "carried", "decayed", "recompute"
MEAN, MIXED, BLENDED = "mean", "mixed", "blended"
WITHOUT_ANCHOR = (MEAN, RECOMPUTE)
KINDS = (ANCHORED, CARRIED, DECAYED, MEAN, MIXED, BLENDED, RECOMPUTE)
ANCHOR_INTERVAL = 512


@dataclass(frozen=True)
class Anchor:
    """Where the last anchor before the end of a match lies.

    Attributes
    ----------
    interval : int
        Anchors lie at its multiples; 0 if `share` says where.
    share : float
        The anchor lies at this share of the match.
    """

    interval: int = ANCHOR_INTERVAL
    share: float = 0.0

    def before(self, limit: int, matched: int) -> int:
        """Return the last anchor's token p <= `limit` of a match of `matched` tokens; 0 if there is none."""
        if self.interval:
            return limit // self.interval * self.interval
        return min(math.floor(round(self.share * matched, 9)), limit)

    @property
    def name(self) -> str:
        """As method names have it."""
        return f"{self.interval}" if self.interval else f"{100 * self.share:g}%"


@dataclass(frozen=True)
class Start:
    """A start that is not the paper's.

    Attributes
    ----------
    kind : str
        "carried": the states of the last anchor at or before the tail, as they are. "decayed": the same, times the product
        of each head's decays over the tokens between. "mean": the model's mean state (`tailreplay.evals.mean_state`),
        which needs no anchor. "mixed": halfway between "carried" and "mean". "blended": as much of the anchor's state as
        "decayed" leaves, filled up with the mean state. "anchored": all tokens after the last anchor of the match, from
        its states, whatever `ratio` asks for: exact. "recompute": zero states, and the tail's tokens
        run through the whole model over the cached keys and values; no hiddens are needed.
    ratio : float
        Share of the match that is replayed.
    anchor : Anchor
    min_tail : int
        Shortest tail.
    """

    kind: str
    ratio: float
    anchor: Anchor = Anchor()
    min_tail: int = 0

    @property
    def budget(self) -> Ratio:
        """The rule of the tail's length."""
        return Ratio(self.ratio, self.min_tail)

    @property
    def anchored(self) -> bool:
        """Whether it needs a saved state."""
        return self.kind not in WITHOUT_ANCHOR

    @property
    def uses_gates(self) -> bool:
        """Whether it needs each head's decays."""
        return self.kind in (DECAYED, BLENDED)

    @property
    def uses_mean(self) -> bool:
        """Whether it needs the model's mean state."""
        return self.kind in (MEAN, MIXED, BLENDED)

    def anchor_of(self, matched: int) -> int:
        """Return the token of the anchor that a match of `matched` tokens starts from."""
        if self.kind == ANCHORED:
            return self.anchor.before(matched, matched)
        return self.anchor.before(matched - self.longest(matched), matched)

    def longest(self, matched: int) -> int:
        """Return how many of `matched` tokens are replayed, by groups whose states have no bounded reach."""
        if self.kind == ANCHORED:
            return matched - self.anchor_of(matched)
        return min(matched, max(math.ceil(round(self.ratio * matched, 9)), self.min_tail))


def parse_start(name: str, min_tail: int = 0, interval: int = ANCHOR_INTERVAL) -> Start | None:
    """Return the start that a method's name stands for, like "carried@0.05", "decayed@0.05/256" or "anchored/50%".

    Parameters
    ----------
    interval : int
        Of the anchors, where the name does not say it after a slash: tokens, or a share of the match with a "%".

    Returns
    -------
    Start or None
        None if the name has another form.

    Raises
    ------
    InvalidRequestError
        If the ratio is outside (0, 1], or there can be no such anchor.
    """
    rule, slash, where = name.partition("/")
    kind, _, ratio = rule.partition("@")
    if kind not in KINDS or (kind == ANCHORED) != ("@" not in rule) or (kind in WITHOUT_ANCHOR and slash):
        return None
    try:
        anchor = _anchor(where) if slash else Anchor(interval)
        share = 1.0 if kind == ANCHORED else float(ratio)
    except ValueError:
        return None
    start = Start(kind, share, anchor, min_tail)
    _ = start.budget  # refuses a bad ratio
    return start


def name_of(start: Start, told: bool) -> str:
    """Return the method's name; `told`: with the anchor."""
    ratio = "" if start.kind == ANCHORED else f"@{start.ratio:g}"
    return f"{start.kind}{ratio}" + (f"/{start.anchor.name}" if told else "")


def check_distance(interval: int) -> None:
    """Refuse what is no distance between anchors.

    Raises
    ------
    InvalidRequestError
        If it is below one token.
    """
    if interval < 1:
        raise InvalidRequestError(f"Anchors lie at least one token apart, got {interval}.", "anchor_interval")


def _anchor(where: str) -> Anchor:
    if not where.endswith("%"):
        check_distance(int(where))
        return Anchor(int(where))
    share = float(where.removesuffix("%")) / 100
    if not 0 <= share <= 1:
        raise InvalidRequestError(f"An anchor lies at 0% to 100% of the match, got {where}.", "methods")
    return Anchor(0, share)
