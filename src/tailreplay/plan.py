"""What a hit will do: the immutable result of a match and a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailreplay.anchor import Anchor
from tailreplay.costs import CostModel
from tailreplay.coverage import covered_match
from tailreplay.decisions import Match
from tailreplay.modes import Mode, Reuse
from tailreplay.page import Page
from tailreplay.provenance import EXACT, Provenance, Start
from tailreplay.topology import Topology

_LONG = 64
"""Tokens of a replay that are worth sparing the next request."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted cost of a hit, beside the prefill that it saves. Bytes and floating-point operations."""

    bytes: int
    replay_flops: float
    hit_flops: float
    full_flops: float


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How one request reuses the cache. Its pages stay pinned until `PrefixCache.release`.

    Attributes
    ----------
    tokens : int
        Length of the prompt.
    matched : int
        Reused tokens m, at most ``tokens - 1``; 0 on a miss.
    tails : tuple of int
        k of each group of the topology: tokens to replay.
    pages : tuple of Page
        Pages that hold tokens ``0 .. m-1``; the last may be used in part. Fewer where the engine's own cache has them.
    exact : bool
        Whether the rebuilt states equal those of a full prefill (within the engine's noise floor).
    provenance : Provenance
        Of everything computed after this hit.
    miss_reason : str
        Why nothing is reused; "" on a hit.
    stop : str
        Why the match went no further (see `tailreplay.decisions.Match`).
    short_tail : bool
        Whether fewer tokens are replayed than asked for, since the hiddens of the others are gone.
    estimate : Estimate or None
        None where the engine gave no cost model.
    start : Start
        What the replay begins with.
    anchor : Anchor or None
        Whose states it begins with; None for zero states. Pinned as the pages are.
    predicted_error : float or None
        Greatest relative error of a layer's recurrent state, where the budget predicts it.
    budget_note : str
        Why the budget did not do what it is for (see `tailreplay.budget.Tails`); "" if it did.
    """

    tokens: int
    matched: int
    tails: tuple[int, ...]
    pages: tuple[Page, ...]
    mode: Mode
    ratio: float | None
    exact: bool
    provenance: Provenance
    miss_reason: str
    stop: str
    estimate: Estimate | None = None
    short_tail: bool = False
    start: Start = Start.COMPLETE
    anchor: Anchor | None = None
    predicted_error: float | None = None
    budget_note: str = ""

    @property
    def replayed(self) -> int:
        """Tokens of the longest tail."""
        return max(self.tails, default=0)

    @property
    def worth_saving(self) -> bool:
        """Whether the states at its end are worth an anchor.

        They are those of a full prefill as far as the pages are, took a replay, and others are likely to come here: some
        have parted from each other here, or the replay was a long one (a prompt that is sent again, say).
        """
        replayed = self.start is Start.COMPLETE and self.replayed > 0
        return replayed and (self.stop == "diverged" or self.replayed >= _LONG)

    @property
    def tail_start(self) -> int:
        """Position of the first token that is replayed."""
        return self.matched - self.replayed


def make_plan(
    match: Match, tokens: int, reuse: Reuse, topology: Topology, *, min_match: int = 1, costs: CostModel | None = None
) -> ReplayPlan:
    """Turn a match into a plan. Pure: neither pins nor loads anything.

    Parameters
    ----------
    tokens : int
        Length of the prompt, at least 1.
    min_match : int
        A shorter match is a miss.
    """
    reason = _miss_reason(match, tokens, reuse, min_match)
    if reason or reuse.budget is None:
        return _miss(match, tokens, reuse, topology, reason)
    covered = covered_match(match, reuse, topology)
    if covered.tokens < max(min_match, 1):
        return _miss(match, tokens, reuse, topology, "no_hiddens")
    m, tails = covered.tokens, covered.tails
    pages = tuple(page for page in match.pages if page.start < m)
    behind = covered.anchor.provenance if covered.anchor is not None else EXACT
    for page in pages:
        behind = behind.worst(page.provenance)
    provenance = behind.after(covered.start)
    estimate = None
    if costs is not None:
        estimate = Estimate(
            bytes=costs.hit_bytes(m, tails, covered.anchor is not None),
            replay_flops=costs.replay_flops(tails),
            hit_flops=costs.hit_flops(m, tokens, tails),
            full_flops=costs.prefill_flops(0, tokens),
        )
    return ReplayPlan(
        tokens,
        m,
        tails,
        pages,
        reuse.mode,
        reuse.ratio,
        provenance.is_exact,
        provenance,
        "",
        match.stop if m == match.tokens else "no_hiddens",
        estimate,
        covered.short_tail,
        covered.start,
        covered.anchor,
        covered.predicted_error,
        covered.note,
    )


def _miss(match: Match, tokens: int, reuse: Reuse, topology: Topology, reason: str) -> ReplayPlan:
    tails = (0,) * len(topology.groups)
    return ReplayPlan(tokens, 0, tails, (), reuse.mode, reuse.ratio, True, EXACT, reason, match.stop)


def without_reuse(plan: ReplayPlan, reason: str) -> ReplayPlan:
    """Return the plan of the same request computed from its first token; `reason` says why. It holds no pages."""
    return replace(
        plan,
        matched=0,
        tails=(0,) * len(plan.tails),
        pages=(),
        exact=True,
        provenance=EXACT,
        miss_reason=reason,
        estimate=None,
        start=Start.COMPLETE,
        anchor=None,
        predicted_error=None,
        budget_note="",
    )


def with_engines_own(plan: ReplayPlan, tokens: int, page_size: int) -> ReplayPlan:
    """Return the plan of a request whose first `tokens` tokens the engine's own, exact prefix cache has.

    It keeps the pages of those tokens if they are all there, so that what follows can be stored after them.
    """
    covered = plan.matched >= tokens and tokens % page_size == 0
    pages = plan.pages[: tokens // page_size] if covered else ()
    return replace(without_reuse(plan, ""), matched=tokens, pages=pages)


def _miss_reason(match: Match, tokens: int, reuse: Reuse, min_match: int) -> str:
    if reuse.mode == "off":
        return "off"
    if tokens < 2:
        return "prompt_too_short"
    if match.tokens == 0:
        return "only_approximate_pages" if match.stop == "approximate" else "unseen_prefix"
    return "below_min_match" if match.tokens < min_match else ""
