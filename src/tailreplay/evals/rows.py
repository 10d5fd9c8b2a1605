"""One row a method: means over tasks and lengths in which every task and length weighs the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tailreplay.evals.cells import paired
from tailreplay.evals.methods import FULL, ZERO, is_ablation, ordered
from tailreplay.evals.observations import Observations
from tailreplay.evals.statistics import Draws, Estimate, average, estimate, gap_closed, ratio

PLAIN_TEXT = "plain text"
ALL_TASKS = "all tasks"


@dataclass(frozen=True)
class Row:
    """What a method keeps.

    Attributes
    ----------
    score : Estimate
        Mean over the discriminating tasks and lengths that have a score.
    retention : Estimate
        The same over the full prefill's, both over the tasks and lengths in which the method was measured.
    nll_gap_closed : Estimate
        Of the NLL averaged over tasks and lengths: 1 is full prefill, 0 is zero states.
    nll_gap_over : str or None
        What the gap was taken over: plain text, or all tasks if there is none.
    score_boundary, retention_boundary : Estimate
        As `score` and `retention`, over the tasks that pass even with zero states.
    n, n_boundary, n_nll : int
        Probes behind `score`, `score_boundary` and `nll_gap_closed`.
    cells : int
        Pairs of task and length behind `score`.
    ablation : bool
        Whether the method is there to check the tasks, not to be used.
    """

    method: str
    score: Estimate
    retention: Estimate
    nll_gap_closed: Estimate
    nll_gap_over: str | None
    score_boundary: Estimate
    retention_boundary: Estimate
    n: int
    n_boundary: int
    n_nll: int
    cells: int
    ablation: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON holds it: an interval as two entries beside its value."""
        entries: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            entries |= value.named(name) if isinstance(value, Estimate) else {name: value}
        return entries


def rows_of(cells: Sequence[Observations]) -> tuple[Row, ...]:
    """Return a row for each method that was measured in any of `cells`."""
    return tuple(_row(cells, method) for method in ordered(method for cell in cells for method in cell.methods))


def mean_scores(cells: Sequence[Observations], *methods: str) -> list[Draws]:
    """Return the methods' mean scores over the cells that have a score of all of them."""
    return _averages(cells, "score", *methods)


def _row(cells: Sequence[Observations], method: str) -> Row:
    discriminating = [cell for cell in cells if cell.task.discriminates]
    boundary = [cell for cell in cells if not cell.task.discriminates]
    plain = [cell for cell in cells if cell.has("first_nll")]
    closed = estimate(gap_closed(*_averages(plain or cells, "nll", method, ZERO, FULL)))
    over = PLAIN_TEXT if plain else ALL_TASKS
    return Row(
        method=method,
        score=estimate(mean_scores(discriminating, method)[0]),
        retention=estimate(ratio(*mean_scores(discriminating, method, FULL))),
        nll_gap_closed=closed,
        nll_gap_over=None if closed.value is None else over,
        score_boundary=estimate(mean_scores(boundary, method)[0]),
        retention_boundary=estimate(ratio(*mean_scores(boundary, method, FULL))),
        n=sum(cell.count(method, "score") for cell in discriminating),
        n_boundary=sum(cell.count(method, "score") for cell in boundary),
        n_nll=sum(cell.count(method, "nll") for cell in plain or cells),
        cells=sum(cell.count(method, "score") > 0 for cell in discriminating),
        ablation=is_ablation(method),
    )


def _averages(cells: Sequence[Observations], field: str, *methods: str) -> list[Draws]:
    means = [paired(cell, field, *methods) for cell in cells]
    shared = [draws for draws in means if all(draw.defined for draw in draws)]
    return [average([draws[place] for draws in shared]) for place in range(len(methods))]
