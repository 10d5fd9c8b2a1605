"""All numbers of an evaluation, computed from its records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tailreplay.evals.cells import Cell, cell_of
from tailreplay.evals.info import TaskInfo
from tailreplay.evals.methods import ordered
from tailreplay.evals.observations import Observations, Record, observe
from tailreplay.evals.rows import Row, rows_of
from tailreplay.evals.statistics import Estimate, Floats, estimate
from tailreplay.evals.verdicts import Verdict, verdicts_of


@dataclass(frozen=True)
class TurnScore:
    """Score of a method at one turn of the conversations of one task and length."""

    task: str
    title: str
    length: int
    turn: int
    method: str
    n: int
    score: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return the turn as JSON holds it."""
        entries = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "score"}
        return entries | self.score.named("score")


@dataclass(frozen=True)
class LayerErrors:
    """Relative error of the states after a hit, by linear layer, at one length.

    Attributes
    ----------
    n : int
        Hits that the means are taken over.
    errors : tuple of float or None
        None for a layer whose error is undefined at any of the hits.
    """

    length: int
    method: str
    n: int
    errors: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the errors as JSON holds them."""
        return asdict(self) | {"errors": list(self.errors)}


@dataclass(frozen=True)
class Summary:
    """What an evaluation found.

    Attributes
    ----------
    documents : int
        Documents measured so far, each counted once for a task and length.
    rows : tuple of Row
        One a method, over all lengths.
    by_length : dict of int to tuple of Row
        The same for each length.
    verdicts : tuple of Verdict
    cells : tuple of Cell
        Task, length and method; discriminating tasks first.
    turns : tuple of TurnScore
    state_error : tuple of LayerErrors
    """

    documents: int
    rows: tuple[Row, ...]
    by_length: dict[int, tuple[Row, ...]]
    verdicts: tuple[Verdict, ...]
    cells: tuple[Cell, ...]
    turns: tuple[TurnScore, ...]
    state_error: tuple[LayerErrors, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON holds it: None where a number is undefined, never NaN."""
        return {
            "documents": self.documents,
            "summary": [row.to_dict() for row in self.rows],
            "by_length": [
                {"length": length, "rows": [row.to_dict() for row in rows]} for length, rows in self.by_length.items()
            ],
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "cells": [cell.to_dict() for cell in self.cells],
            "turns": [turn.to_dict() for turn in self.turns],
            "state_error": [errors.to_dict() for errors in self.state_error],
        }


def summarise(records: Iterable[Record], tasks: Mapping[str, TaskInfo], seed: int = 0) -> Summary:
    """Compute everything that reports show; the records may be those of a run that still goes on.

    Parameters
    ----------
    records : iterable of mappings
        One a document. The last counts if one document of a task and length comes twice.
    tasks : mapping of str to TaskInfo
        By name, in the order of the reports.
    seed : int, optional
        Of the bootstrap.

    Raises
    ------
    ValueError
        If a record's task is not in `tasks`.
    """
    cells = observe(records, tasks, seed)
    lengths = sorted({cell.length for cell in cells})
    return Summary(
        documents=sum(cell.size for cell in cells),
        rows=rows_of(cells),
        by_length={length: rows_of([cell for cell in cells if cell.length == length]) for length in lengths},
        verdicts=verdicts_of(cells),
        cells=tuple(cell_of(cell, method) for cell in cells for method in cell.methods),
        turns=tuple(turn for cell in cells for turn in _turns(cell)),
        state_error=tuple(errors for length in lengths for errors in _state_errors(cells, length)),
    )


def _turns(cell: Observations) -> list[TurnScore]:
    scores = []
    for turn in cell.turns():
        where = np.array([probe.turn == turn for probe in cell.probes], dtype=np.bool_)
        for method in cell.methods:
            n = int((where & np.isfinite(cell.values(method, "score"))).sum())
            score = estimate(cell.mean(method, "score", where=where))
            scores.append(TurnScore(cell.task.name, cell.task.title, cell.length, turn, method, n, score))
    return scores


def _state_errors(cells: Sequence[Observations], length: int) -> list[LayerErrors]:
    hits = [hit["state_error"] for cell in cells if cell.length == length for hit in cell.hits]
    return [
        _mean_errors(length, method, np.array([hit[method] for hit in hits if method in hit], dtype=np.float64))
        for method in ordered(method for hit in hits for method in hit)
    ]


def _mean_errors(length: int, method: str, errors: Floats) -> LayerErrors:
    means = (float(mean) for mean in errors.mean(axis=0))
    return LayerErrors(length, method, len(errors), tuple(mean if math.isfinite(mean) else None for mean in means))
