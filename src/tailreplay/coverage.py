"""How far a match can be used when some of its pages have lost their hiddens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tailreplay.budget import Tails, tails_of
from tailreplay.decisions import Match
from tailreplay.forgetting import forgetting_of
from tailreplay.modes import Reuse
from tailreplay.topology import Topology


@dataclass(frozen=True, slots=True)
class Covered:
    """What of a match the hiddens suffice for.

    Attributes
    ----------
    tokens : int
        Length m; 0 if they suffice for nothing.
    tails : tuple of int
        k of each group.
    short_tail : bool
        Whether some tail is shorter than the budget asked for.
    predicted_error : float or None
        As the budget predicts it, for the tails that it asked for.
    note : str
        Of the budget (see `tailreplay.budget.Tails`).
    """

    tokens: int
    tails: tuple[int, ...]
    short_tail: bool = False
    predicted_error: float | None = None
    note: str = ""


def covered_match(match: Match, reuse: Reuse, topology: Topology) -> Covered:
    """Return the longest part of `match` whose tail can be replayed.

    In "replay" mode a tail of at least half its length will do; exact mode takes whole ones only, since a shorter one
    would not be exact. Reads the pages' `has_hidden` only.
    """
    assert reuse.budget is not None
    for end, start in _candidates(match):
        wanted = _tails(match, reuse, end, topology)
        tails = wanted.tokens
        needed = max((k for k, group in zip(tails, topology.groups, strict=True) if group.stores_hidden), default=0)
        if needed <= end - start:
            longer = _lengthened(tails, end - start, reuse, topology)
            return Covered(end, longer, predicted_error=wanted.predicted_error, note=wanted.note)
        if reuse.mode == "replay" and needed <= 2 * (end - start):
            # The embedding group reads token ids, but states of one length are easier to reason about than of two.
            # What was predicted was so for longer tails.
            return Covered(end, tuple(min(k, end - start) for k in tails), short_tail=True, note=wanted.note)
    return Covered(0, (0,) * len(topology.groups))


def _lengthened(tails: tuple[int, ...], room: int, reuse: Reuse, topology: Topology) -> tuple[int, ...]:
    """Round recurrent groups' tails up to the next bucket, where that many tokens (`room`) can be replayed."""
    if reuse.mode != "replay" or not reuse.buckets:
        return tails
    return tuple(
        k if group.receptive_field is not None else next((b for b in reuse.buckets if k <= b <= room), k)
        for k, group in zip(tails, topology.groups, strict=True)
    )


def _candidates(match: Match) -> Iterator[tuple[int, int]]:
    """Yield (m, first token from which on all hiddens up to m are there), longest first."""
    end = start = match.tokens
    for page in reversed(match.pages):
        if page.has_hidden:
            start = page.start
            continue
        # A run of hiddens ends here. Within a run the longest m is best: its tail grows slower than what covers it.
        yield end, start
        end = start = page.start
    yield end, start


def _tails(match: Match, reuse: Reuse, matched: int, topology: Topology) -> Tails:
    assert reuse.budget is not None
    return tails_of(reuse.budget, matched, topology, lambda longest: forgetting_of(match.pages, matched, longest))
