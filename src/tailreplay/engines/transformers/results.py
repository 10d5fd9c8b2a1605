"""What a generation returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tailreplay.plan import ReplayPlan


@dataclass(frozen=True)
class ReuseReport:
    """How the prompt was answered from the cache.

    Attributes
    ----------
    matched : int
        Reused tokens: their keys and values were loaded, not computed.
    replayed : int
        Those of them whose hiddens ran through the linear layers again (longest tail); a part of `matched`.
    shared : int
        Tokens computed once for a whole batch and taken over exactly; 0 outside batches.
    mode : str
        "replay", "exact", "zero" or "off".
    exact : bool
        Whether the states equal those of a full prefill.
    provenance : str
        Of the answer: "exact" or "approximate (depth n)".
    depth : int
        Approximate replays behind the answer; 0 if there is none.
    miss_reason : str
        Why nothing was reused; "" on a hit.
    stop : str
        Why the match went no further: "end", "unseen", "diverged", "approximate" or "no_hiddens".
    start : str
        What the replay began with, "complete" if it neglects nothing (see `tailreplay.provenance.Start`).
    anchor : int or None
        Token after which the states were saved that it began with; None for zero states.
    short_tail : bool
        Whether fewer tokens were replayed than asked for, since the hiddens of the others are gone.
    predicted_error : float or None
        Greatest relative error of a layer's recurrent state, as an adaptive budget predicts it; None without one.
    budget_note : str
        "" or why the budget did not do what it is for: "cut" (the error asked for would take a longer tail than is allowed)
        or "no_gates" (pages that do not know what their tokens forget: the default ratio was replayed).
    """

    prompt_tokens: int
    matched: int
    replayed: int
    mode: str
    ratio: float | None
    exact: bool
    provenance: str
    depth: int
    miss_reason: str
    stop: str
    shared: int = 0
    short_tail: bool = False
    start: str = "complete"
    anchor: int | None = None
    predicted_error: float | None = None
    budget_note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)

    def with_shared(self, prompt_tokens: int, shared: int) -> ReuseReport:
        """Return the report of a batch member that took `shared` tokens over: nothing was replayed again for it."""
        return replace(self, prompt_tokens=prompt_tokens, shared=shared, replayed=0 if shared else self.replayed)


def report_of(plan: ReplayPlan) -> ReuseReport:
    """Describe a plan for people."""
    return ReuseReport(
        prompt_tokens=plan.tokens,
        matched=plan.matched,
        replayed=plan.replayed,
        mode=plan.mode,
        ratio=plan.ratio,
        exact=plan.exact,
        provenance=str(plan.provenance),
        depth=plan.provenance.depth,
        miss_reason=plan.miss_reason,
        stop=plan.stop,
        short_tail=plan.short_tail,
        start=str(plan.start),
        anchor=plan.anchor.position if plan.anchor is not None else None,
        predicted_error=plan.predicted_error,
        budget_note=plan.budget_note,
    )


@dataclass
class Timings:
    """Seconds of each phase. `first_token` is the time to first token, from the call to the first sampled token.

    `predicted` is what lookup aside was expected up to the first token, from the plan's operations and bytes and from how
    fast requests before it ran; 0 where those do not tell yet.
    """

    lookup: float = 0.0
    copy: float = 0.0
    replay: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    predicted: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Return the timings as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation.

    Attributes
    ----------
    text : str
        Decoded answer, without stop strings and special tokens.
    tokens : list of int
        Sampled tokens, the last one included.
    finish_reason : str
        "stop" (an end token or a stop string), "length" or "cancelled".
    """

    text: str
    tokens: list[int]
    finish_reason: str
    reuse: ReuseReport
    timings: Timings = field(default_factory=Timings)
