"""Records of one task at one length, as arrays that statistics are taken of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailreplay.evals.info import TaskInfo
from tailreplay.evals.methods import ordered
from tailreplay.evals.statistics import Draws, Floats, mean, resample

Record = Mapping[str, Any]
Mask = NDArray[np.bool_]

_FIELDS = ("score", "nll", "first_nll", "kl", "first_kl")


@dataclass(frozen=True)
class Probe:
    """One question after one hit, with every method's result."""

    document: int
    turn: int | None
    matched: int
    evidence: int | None
    tails: Mapping[str, int]
    results: Mapping[str, Mapping[str, Any]]

    def inside(self, method: str) -> bool | None:
        """Return whether the method replays the last fact that the answer needs; None where that is not known."""
        if self.evidence is None or method not in self.tails:
            return None
        return self.evidence >= self.matched - self.tails[method]


class Observations:
    """What was measured of one task at one length.

    Parameters
    ----------
    task : TaskInfo
    length : int
    records : sequence of records
        Of this task and length, one a document.
    seed : int
        Of the bootstrap.
    """

    def __init__(self, task: TaskInfo, length: int, records: Sequence[Record], seed: int) -> None:
        self.task = task
        self.length = length
        self.size = len(records)
        self.probes = [probe for document, record in enumerate(records) for probe in _probes(document, record)]
        self.methods = ordered(method for probe in self.probes for method in probe.results)
        self.hits = [hit for record in records for hit in record["hits"]]
        self._documents = np.array([probe.document for probe in self.probes], dtype=np.intp)
        self._values = {(m, field): _column(self.probes, m, field) for m in self.methods for field in _FIELDS}
        self._counts = resample(self.size, seed=seed, stratum=f"{task.name}/{length}")

    def values(self, method: str, field: str) -> Floats:
        """Return `field` of the method's result at each probe, NaN where there is none."""
        found = self._values.get((method, field))
        return np.full(len(self.probes), math.nan) if found is None else found.copy()

    def mean(self, method: str, field: str, beside: Iterable[str] = (), where: Mask | None = None) -> Draws:
        """Return the mean of `field` of a method's results.

        Parameters
        ----------
        method, field : str
        beside : iterable of str, optional
            Methods it will be compared with: only probes at which they have the field too are counted.
        where : array of bool, shape (probes,), optional
            The probes to look at.
        """
        values = self.values(method, field)
        for other in beside:
            values[np.isnan(self.values(other, field))] = math.nan
        if where is not None:
            values[~where] = math.nan
        return mean(values, self._documents, self._counts)

    def count(self, method: str, field: str) -> int:
        """Return the number of probes at which the method has the field."""
        return int(np.isfinite(self.values(method, field)).sum())

    def has(self, field: str) -> bool:
        """Return whether any method has the field at any probe."""
        return any(self.count(method, field) for method in self.methods)

    def documents(self, method: str) -> int:
        """Return the number of documents in which the method was probed."""
        return len({probe.document for probe in self.probes if method in probe.results})

    def turns(self) -> list[int]:
        """Return the turns of the conversations, in order; none for other tasks."""
        return sorted({probe.turn for probe in self.probes if probe.turn is not None})

    def mean_tail(self, method: str) -> float | None:
        """Return the mean number of replayed tokens over hits; None for a method that has no tail."""
        tails = [hit["tails"][method] for hit in self.hits if method in hit["tails"]]
        return sum(tails) / len(tails) if tails else None


def observe(records: Iterable[Record], tasks: Mapping[str, TaskInfo], seed: int = 0) -> list[Observations]:
    """Sort records by task and length.

    Returns
    -------
    list of Observations
        Those that hold a probe: discriminating tasks first, then in the order of `tasks`, then by length.

    Raises
    ------
    ValueError
        If a record's task is not in `tasks`.
    """
    groups: dict[tuple[str, int], dict[int, Record]] = {}
    for record in records:
        if record["task"] not in tasks:
            raise ValueError(f"Unknown task {record['task']!r}; known are {', '.join(tasks)}.")
        # A run that went on after an interruption may hold a document twice; the later record counts.
        groups.setdefault((record["task"], record["length"]), {})[record["document"]] = record
    places = {name: (not task.discriminates, place) for place, (name, task) in enumerate(tasks.items())}
    observed = [
        Observations(tasks[name], length, list(groups[name, length].values()), seed)
        for name, length in sorted(groups, key=lambda key: (places[key[0]], key[1]))
    ]
    return [cell for cell in observed if cell.probes]


def _probes(document: int, record: Record) -> Iterator[Probe]:
    for hit in record["hits"]:
        for probe in hit["probes"]:
            yield Probe(document, hit["turn"], hit["matched"], probe["evidence"], hit["tails"], probe["results"])


def _column(probes: Sequence[Probe], method: str, field: str) -> Floats:
    found = [probe.results.get(method, {}).get(field) for probe in probes]
    return np.array([math.nan if value is None else value for value in found], dtype=np.float64)
