"""Two checks that the tasks measure what they are meant to, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tailreplay.evals.methods import FULL, WIPED, ZERO
from tailreplay.evals.observations import Observations
from tailreplay.evals.rows import mean_scores
from tailreplay.evals.statistics import Draws, Estimate, estimate, ratio

WIPED_BELOW = 0.1
ZERO_BELOW = 0.9


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check.

    Attributes
    ----------
    name : str
    text : str
        One sentence with the numbers.
    passed : bool or None
        None if there is not enough data to say.
    """

    name: str
    text: str
    passed: bool | None

    @property
    def word(self) -> str:
        """The outcome in one word."""
        return {True: "passed", False: "failed", None: "undecided"}[self.passed]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON holds it."""
        return asdict(self)


def verdicts_of(cells: Sequence[Observations]) -> tuple[Verdict, ...]:
    """Return the verdicts on the wiped KV and on zero states."""
    return _wiped(cells), _zero(cells)


def _wiped(cells: Sequence[Observations]) -> Verdict:
    """Retrieval must live in the attention layers: with their KV gone it has to fail."""
    retrieval = [cell for cell in cells if cell.task.retrieval]
    wiped, full = mean_scores(retrieval, WIPED, FULL)
    kept = estimate(ratio(wiped, full))
    wanted = f"under {WIPED_BELOW:.0%} wanted"
    passed = None if kept.value is None else kept.value < WIPED_BELOW
    return Verdict("kv-wipe", f"KV wipe: {_fall('retrieval', full, wiped, kept, wanted)}", passed)


def _zero(cells: Sequence[Observations]) -> Verdict:
    """Tasks that are meant to need the states must suffer without them, or they cannot tell one replay from another."""
    discriminating = [cell for cell in cells if cell.task.discriminates]
    zero, full = mean_scores(discriminating, ZERO, FULL)
    kept = estimate(ratio(zero, full))
    wanted = f"an interval under {ZERO_BELOW:.0%} wanted"
    passed = None if kept.high is None else kept.high < ZERO_BELOW
    text = _fall("on discriminating tasks score", full, zero, kept, wanted)
    return Verdict("zero-states", f"Zero states: {text}", passed)


def _fall(what: str, full: Draws, without: Draws, kept: Estimate, wanted: str) -> str:
    if not full.defined:
        return f"{what} not measured."
    falls = "falls" if without.value < full.value else "does not fall:"
    text = f"{what} {falls} from {full.value:.2f} to {without.value:.2f}"
    if kept.value is None:
        return f"{text}; nothing to lose, so this says nothing."
    interval = "no interval" if kept.low is None else f"interval {kept.low:.0%} to {kept.high:.0%}"
    return f"{text}, {kept.value:.0%} of full prefill's ({interval}; {wanted})."
