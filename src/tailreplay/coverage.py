"""How far a match can be used, and what its replay begins with, when some pages have lost their hiddens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tailreplay.anchor import Anchor
from tailreplay.budget import Tails, tails_of
from tailreplay.decisions import Match
from tailreplay.forgetting import forgetting_of
from tailreplay.modes import Reuse
from tailreplay.provenance import EXACT, Provenance, Start
from tailreplay.topology import Topology


@dataclass(frozen=True, slots=True)
class Covered:
    """What of a match the hiddens and anchors suffice for.

    Attributes
    ----------
    tokens : int
        Length m; 0 if they suffice for nothing.
    tails : tuple of int
        k of each group.
    start : Start
        What the replay begins with.
    anchor : Anchor or None
        Whose states it begins with; None for zero states.
    short_tail : bool
        Whether some tail is shorter than the budget asked for.
    predicted_error : float or None
        As the budget predicts it, for the tails that it asked for.
    note : str
        Of the budget (see `tailreplay.budget.Tails`).
    """

    tokens: int
    tails: tuple[int, ...]
    start: Start = Start.ZERO
    anchor: Anchor | None = None
    short_tail: bool = False
    predicted_error: float | None = None
    note: str = ""


def covered_match(match: Match, reuse: Reuse, topology: Topology) -> Covered:
    """Return the longest part of `match` whose states can be rebuilt, in the cheapest way that the mode allows.

    In "replay" mode a tail of at least half its length will do; exact mode takes whole ones only, since a shorter one
    would not be exact. Either prefers a saved state that is near enough. Reads the pages' `has_hidden` only.
    """
    usable = [anchor for anchor in match.anchors if reuse.terms.take(anchor.provenance)] if reuse.anchors else []
    for end, start in _candidates(match, usable, bool(topology.stored_groups)):
        covered = _covered(match, end, start, usable, reuse, topology)
        if covered is not None:
            return covered
    return Covered(0, (0,) * len(topology.groups))


def _covered(
    match: Match, end: int, start: int, anchors: Sequence[Anchor], reuse: Reuse, topology: Topology
) -> Covered | None:
    """Return how a hit of `end` tokens can be had whose hiddens are there from token `start` on; None if it cannot."""
    wanted = _tails(match, reuse, end, topology)
    tails = wanted.tokens
    needed = max((k for k, group in zip(tails, topology.groups, strict=True) if group.stores_hidden), default=0)
    worst = _worst(match, end)
    near = _nearest(anchors, end, worst)
    if near is not None and near.position >= start and end - near.position <= max(tails, default=0):
        predicted = None if wanted.predicted_error is None else 0.0
        return Covered(end, _since(near, end, topology), Start.COMPLETE, near, predicted_error=predicted)
    if needed <= end - start:
        longer = _lengthened(tails, end - start, reuse, topology)
        covered = Covered(end, longer, predicted_error=wanted.predicted_error, note=wanted.note)
        return _begun(covered, anchors, worst, reuse, topology)
    if reuse.mode == "replay" and needed <= 2 * (end - start):
        # The embedding group reads token ids, but states of one length are easier to reason about than of two.
        # What was predicted was so for longer tails.
        shorter = Covered(end, tuple(min(k, end - start) for k in tails), short_tail=True, note=wanted.note)
        return _begun(shorter, anchors, worst, reuse, topology)
    return None


def _begun(covered: Covered, anchors: Sequence[Anchor], worst: Provenance, reuse: Reuse, topology: Topology) -> Covered:
    """Say what tails begin with that no anchor shortens."""
    m = covered.tokens
    fields = [min(m, group.receptive_field or m) for group in topology.groups]
    if all(k >= field for k, field in zip(covered.tails, fields, strict=True)):
        return replace(covered, start=Start.COMPLETE)
    carries = reuse.start in ("carried", "mixed")
    stale = _nearest(anchors, m - max(covered.tails), worst) if carries else None
    if reuse.start == "mixed" and reuse.mean and reuse.mode == "replay":
        start = Start.MEAN if stale is None else Start.MIXED
    else:
        start = Start.ZERO if stale is None else Start.CARRIED
    # A prediction is one for zero states.
    predicted = covered.predicted_error if start is Start.ZERO else None
    return replace(covered, start=start, anchor=stale, predicted_error=predicted)


def _since(anchor: Anchor, end: int, topology: Topology) -> tuple[int, ...]:
    gap = end - anchor.position
    return tuple(gap if group.receptive_field is None else min(gap, group.receptive_field) for group in topology.groups)


def _worst(match: Match, end: int) -> Provenance:
    found = EXACT
    for page in match.pages:
        if page.start < end:
            found = found.worst(page.provenance)
    return found


def _nearest(anchors: Sequence[Anchor], end: int, worst: Provenance) -> Anchor | None:
    """Return the last anchor up to `end`; one that makes nothing worse than the pages are goes before others."""
    before = [anchor for anchor in anchors if anchor.position <= end]
    harmless = (anchor for anchor in reversed(before) if anchor.provenance.worst(worst) == worst)
    return next(harmless, before[-1] if before else None)


def _lengthened(tails: tuple[int, ...], room: int, reuse: Reuse, topology: Topology) -> tuple[int, ...]:
    """Round recurrent groups' tails up to the next bucket, where that many tokens (`room`) can be replayed."""
    if reuse.mode != "replay" or not reuse.buckets:
        return tails
    return tuple(
        k if group.receptive_field is not None else next((b for b in reuse.buckets if k <= b <= room), k)
        for k, group in zip(tails, topology.groups, strict=True)
    )


def _candidates(match: Match, anchors: Sequence[Anchor], stored: bool) -> Iterator[tuple[int, int]]:
    """Yield (m, first token from which on all hiddens up to m are there), longest first.

    None lack where none are `stored`: the only group reads token ids.
    """
    end = start = match.tokens
    waiting = [anchor.position for anchor in anchors]
    for page in reversed(match.pages):
        if page.has_hidden or not stored:
            start = page.start
            continue
        # A run of hiddens ends here. Within a run the longest m is best: its tail grows slower than what covers it.
        yield end, start
        while waiting and waiting[-1] > page.start:
            position = waiting.pop()
            if position < start:
                yield position, position  # nothing need be replayed
        end = start = page.start
    yield end, start


def _tails(match: Match, reuse: Reuse, matched: int, topology: Topology) -> Tails:
    assert reuse.budget is not None
    return tails_of(reuse.budget, matched, topology, lambda longest: forgetting_of(match.pages, matched, longest))
