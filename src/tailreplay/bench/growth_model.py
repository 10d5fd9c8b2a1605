"""How the time of a full prefill and of a hit grows with the prefix: a few rates, fitted to measured rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailreplay.bench.ttft_rows import tails_of
from tailreplay.budget import Ratio
from tailreplay.costs import CostModel

PARTS = ("full", "lookup", "copy", "replay", "query")


@dataclass(frozen=True)
class Work:
    """What a full prefill and a hit of one length and ratio have to do.

    Attributes
    ----------
    terms : dict
        By part of `PARTS`: the quantities that its time is a sum of, each with a rate of its own.
    host_bytes : int
        Bytes of the cached prefix.
    """

    terms: Mapping[str, tuple[float, ...]]
    host_bytes: int


def work_of(costs: CostModel, length: int, query: int, ratio: float, replayed: int | None = None) -> Work:
    """Count the work: floating-point operations outside and inside attention's scores, bytes, tokens, and 1 a time.

    Parameters
    ----------
    replayed : int, optional
        Tokens of the longest tail where it was measured; else what the engines' own rule makes of `ratio`.
    """
    groups = costs.topology.groups
    tails = [Ratio(ratio).tail(length, group) for group in groups] if replayed is None else tails_of(groups, replayed)
    total = length + query
    per_pair = sum(layer.per_pair for layer in costs.layers)
    pairs = per_pair * total * (total + 1) / 2
    query_pairs = per_pair * query * (length + (query + 1) / 2)
    terms = {
        "full": (costs.prefill_flops(0, total) - pairs, pairs),
        "lookup": (1.0, float(length)),
        "copy": (1.0, float(length * costs.kv_bytes)),
        "replay": (1.0, costs.replay_flops(tails)),
        "query": (1.0, query_pairs),
    }
    return Work(terms, length * costs.page_bytes_per_token)


@dataclass(frozen=True)
class Growth:
    """Milliseconds a unit of each term of each part.

    Attributes
    ----------
    beside : bool
        Whether copies run beside the replay, so that a hit takes the longer of the two and not both.
    """

    rates: dict[str, tuple[float, ...]]
    beside: bool = False

    def predict(self, work: Work) -> dict[str, float]:
        """Return milliseconds of each part, and ``hit`` and ``speedup``."""
        parts = {name: float(np.dot(self.rates[name], work.terms[name])) for name in PARTS}
        loaded = max(parts["copy"], parts["replay"]) if self.beside else parts["copy"] + parts["replay"]
        hit = parts["lookup"] + loaded + parts["query"]
        return {**parts, "hit": hit, "speedup": parts["full"] / hit}


def fitted(rows: Sequence[dict[str, Any]], work: Callable[[dict[str, Any]], Work], beside: bool = False) -> Growth:
    """Fit the rates to rows of `tailreplay bench ttft`: the least sum of squared relative errors, no rate below zero.

    Parameters
    ----------
    work : callable
        Counts a row's work.
    beside : bool
        Whether copies ran beside the replay.
    """
    rates = {}
    for name in PARTS:
        terms = np.array([work(row).terms[name] for row in rows])
        rates[name] = tuple(_least_squares(terms, np.array([row[f"{name}_ms"] for row in rows])))
    return Growth(rates, beside)


def _least_squares(terms: np.ndarray, times: np.ndarray) -> np.ndarray:
    # Relative errors: else the longest prefix alone would set the rates. What takes no time has no error to speak of.
    weights = 1 / np.maximum(times, 1e-3)
    scale = terms.max(axis=0)
    kept = np.ones(terms.shape[1], dtype=bool)
    found = np.zeros(terms.shape[1])
    while kept.any():
        columns = terms[:, kept] / scale[kept] * weights[:, None]
        found[:] = 0
        found[kept] = np.linalg.lstsq(columns, times * weights, rcond=None)[0] / scale[kept]
        if (found >= 0).all():
            break
        kept[np.argmin(found * scale)] = False
    return np.maximum(found, 0)
