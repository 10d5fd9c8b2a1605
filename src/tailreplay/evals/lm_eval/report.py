"""Scores of several methods side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailreplay.evals.lm_eval.methods import Method
from tailreplay.evals.lm_eval.tally import Tally


@dataclass(frozen=True)
class Outcome:
    """What one method gave: the harness' own results, and what was reused by task."""

    method: Method
    results: dict[str, Any]
    tallies: dict[str, Tally]


@dataclass(frozen=True)
class Row:
    """One score.

    Attributes
    ----------
    stderr : float or None
        None where the harness has no formula.
    retention : float or None
        The score as a share of full prefill's (the other way round where less is better); None without one to compare to.
    """

    task: str
    metric: str
    method: Method
    score: float
    stderr: float | None
    retention: float | None
    samples: int
    tally: Tally

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "task": self.task,
            "metric": self.metric,
            "method": self.method.name,
            "ratio": self.method.reuse.ratio,
            "score": self.score,
            "stderr": self.stderr,
            "retention": self.retention,
            "samples": self.samples,
            **self.tally.to_dict(),
        }


def rows_of(outcomes: list[Outcome]) -> list[Row]:
    """Return a row for each task, metric and method, the methods of a metric next to each other."""
    full = next((outcome for outcome in outcomes if outcome.method.name == "full"), None)
    rows = []
    for task, values in outcomes[0].results["results"].items():
        for key in _metrics(values):
            for outcome in outcomes:
                got = outcome.results["results"][task]
                metric, _, which = key.partition(",")
                rows.append(
                    Row(
                        task=task,
                        metric=metric if which == "none" else f"{metric} ({which})",
                        method=outcome.method,
                        score=float(got[key]),
                        stderr=_number(got.get(f"{metric}_stderr,{which}")),
                        retention=None if full is None else _retention(outcome, full, task, key),
                        samples=int(outcome.results["n-samples"][task]["effective"]),
                        tally=outcome.tallies.get(task, Tally()),
                    )
                )
    return rows


def mean_retention(rows: list[Row], method: Method) -> float | None:
    """Return the mean of a method's retentions, None if there is none."""
    found = [row.retention for row in rows if row.method == method and row.retention is not None]
    return sum(found) / len(found) if found else None


def _metrics(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of the scores that say something."""
    keys = [key for key, value in values.items() if "," in key and "_stderr," not in key and _number(value) is not None]
    # RULER's tasks have a score for every length, -1 for those that were not run.
    keys = [key for key in keys if not (key.partition(",")[0].isdigit() and values[key] == -1)]
    # LongBench's tasks have one score under two names.
    named = [key for key in keys if key.partition(",")[0] != "score"]
    return named or keys


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _retention(outcome: Outcome, full: Outcome, task: str, key: str) -> float | None:
    score, best = (float(each.results["results"][task][key]) for each in (outcome, full))
    higher = outcome.results["higher_is_better"].get(task, {}).get(key.partition(",")[0], True)
    above, below = (score, best) if higher is not False else (best, score)
    return above / below if below > 0 else None
