"""What one method reached on one task at one length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tailreplay.evals.methods import FULL, ZERO, is_ablation
from tailreplay.evals.observations import Observations
from tailreplay.evals.statistics import Draws, Estimate, difference, estimate, gap_closed, ratio


@dataclass(frozen=True)
class Split:
    """Scores of the probes whose needed facts lie inside the tail, or of those where one lies before it.

    Attributes
    ----------
    n : int
        Probes.
    score : float or None
    full : float or None
        What the full prefill scores at the same probes: recent facts are easier for it too.
    """

    n: int
    score: float | None
    full: float | None


@dataclass(frozen=True)
class Cell:
    """One method on one task at one length.

    Attributes
    ----------
    n, documents : int
        Probes and the documents they come from.
    score, retention : Estimate
        Mean score, and the same over that of the full prefill.
    nll, first_nll : float or None
        Mean nats per token of the reference text, and of its first 8 tokens.
    nll_over_full, first_nll_over_full : Estimate
        By how much they exceed the full prefill's.
    nll_gap_closed : Estimate
        1 is as good as the full prefill, 0 as bad as zero states.
    tail : float or None
        Mean replayed tokens over hits.
    """

    task: str
    title: str
    discriminates: bool
    length: int
    method: str
    ablation: bool
    n: int
    documents: int
    score: Estimate
    retention: Estimate
    nll: float | None
    nll_over_full: Estimate
    nll_gap_closed: Estimate
    first_nll: float | None
    first_nll_over_full: Estimate
    inside: Split
    outside: Split
    tail: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as JSON holds it: an interval as two entries beside its value."""
        entries: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Estimate):
                entries |= value.named(name)
            else:
                entries[name] = asdict(value) if isinstance(value, Split) else value
        return entries


def retention_of(cell: Observations, method: str) -> Draws:
    """Return the method's score over the full prefill's at the same probes."""
    return ratio(*paired(cell, "score", method, FULL))


def nll_gap_of(cell: Observations, method: str) -> Draws:
    """Return the share of the gap in NLL between zero states and full prefill that the method closes."""
    return gap_closed(*paired(cell, "nll", method, ZERO, FULL))


def paired(cell: Observations, field: str, *methods: str) -> list[Draws]:
    """Return the methods' means of `field` over the probes at which all of them have it."""
    return [cell.mean(method, field, beside=methods) for method in methods]


def cell_of(cell: Observations, method: str) -> Cell:
    """Return what `method` reached."""
    return Cell(
        task=cell.task.name,
        title=cell.task.title,
        discriminates=cell.task.discriminates,
        length=cell.length,
        method=method,
        ablation=is_ablation(method),
        n=sum(method in probe.results for probe in cell.probes),
        documents=cell.documents(method),
        score=estimate(cell.mean(method, "score")),
        retention=estimate(retention_of(cell, method)),
        nll=_value(cell.mean(method, "nll")),
        nll_over_full=estimate(difference(*paired(cell, "nll", method, FULL))),
        nll_gap_closed=estimate(nll_gap_of(cell, method)),
        first_nll=_value(cell.mean(method, "first_nll")),
        first_nll_over_full=estimate(difference(*paired(cell, "first_nll", method, FULL))),
        inside=_split(cell, method, lambda inside: inside is True),
        outside=_split(cell, method, lambda inside: inside is False),
        tail=cell.mean_tail(method),
    )


def _split(cell: Observations, method: str, wanted: Callable[[bool | None], bool]) -> Split:
    where = np.array([wanted(probe.inside(method)) for probe in cell.probes], dtype=np.bool_)
    where &= np.isfinite(cell.values(method, "score"))
    score = cell.mean(method, "score", where=where)
    return Split(int(where.sum()), _value(score), _value(cell.mean(FULL, "score", where=where)))


def _value(draws: Draws) -> float | None:
    return draws.value if draws.defined else None
