"""One document in the cache, its true states at each boundary, and the states that a method rebuilds there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.engines.transformers.results import Timings
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.errors import CacheConfigError
from tailreplay.evals.branches import KeysValues
from tailreplay.evals.document import Document, Hit
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse, parse_reuse

WORST = 1000.0
"""Greatest state error that is told apart from others."""


@dataclass
class Boundary:
    """A hit with the true states after its prefix."""

    hit: Hit
    ids: list[int]
    states: compat.DynamicCache


class Prefix:
    """Runs a document once, as a first request would, and answers what its hits start from.

    Parameters
    ----------
    lm : HybridLM
        Its cache is emptied for each document.
    document : Document
    """

    def __init__(self, lm: HybridLM, document: Document) -> None:
        self._lm = lm
        self._document = document
        self._namespace: Namespace = lm.namespace()

    @torch.inference_mode()
    def boundaries(self) -> list[Boundary]:
        """Compute the document by plain chunked prefill and store its pages; returns each hit with its true states."""
        lm, ids = self._lm, list(self._document.ids)
        lm.cache.clear()
        found: list[Boundary] = []
        with lm.lock:
            sequence, plan = lm.begin(ids, parse_reuse("off"), self._namespace, len(ids), True, Timings())
            lm.cache.release(plan)
            for hit in self._document.hits:
                self._extend(sequence, ids[: hit.at])
                branch = sequence
                if hit.extra:
                    branch = sequence.fork(hit.matched)
                    self._extend(branch, [*ids[: hit.at], *hit.extra])
                    branch.finish()
                found.append(Boundary(hit, list(branch.tokens), self._snapshot(branch)))
            sequence.finish()
        return found

    @torch.inference_mode()
    def restore(self, boundary: Boundary, reuse: Reuse) -> tuple[compat.DynamicCache, int, KeysValues]:
        """Look the boundary's prefix up and rebuild the states.

        Returns
        -------
        states : DynamicCache
            Without keys and values.
        tail : int
            Tokens replayed, of the group that replayed most.
        kv : list of (keys, values)
            Of each attention layer, ``(m, kv_heads, head_dim)``.

        Raises
        ------
        CacheConfigError
            If the cache is too small for the document.
        """
        lm = self._lm
        with lm.lock:
            # One token must be left to run: a lookup never matches the last one.
            ids = [*boundary.ids, boundary.hit.probes[0].query[0]]
            sequence, plan = lm.begin(ids, reuse, self._namespace, len(boundary.ids), False, Timings())
            sequence.wait_loaded()
            lm.cache.release(plan)
        whole_hit(plan.matched, len(boundary.ids), plan.miss_reason or plan.stop)
        kv = [entry.rows(0, plan.matched) for entry in lm.backbone.kv(sequence.past)]
        return self._snapshot(sequence), max(plan.tails, default=0), kv

    def _extend(self, sequence: Sequence, ids: list[int]) -> None:
        chunk = self._lm.prefill_chunk
        for start in range(len(sequence.tokens), len(ids), chunk):
            sequence.extend(ids[start : start + chunk])

    def _snapshot(self, sequence: Sequence) -> compat.DynamicCache:
        """Return the states alone: keys and values are in the cache."""
        states = compat.new_cache(self._lm.backbone.config)
        compat.copy_states(sequence.past, states)
        return states


def whole_hit(matched: int, expected: int, reason: str) -> None:
    """Refuse a hit that is shorter than it has to be: it would be measured as something else.

    Raises
    ------
    CacheConfigError
        If it is.
    """
    if matched >= expected:
        return
    found = f"A hit found {matched} of {expected} tokens in the cache ({reason})"
    if reason == "load_failed":
        raise CacheConfigError(f"{found}: loading them failed, perhaps for lack of memory.")
    raise CacheConfigError(f"{found}: give it more room with --host-bytes.")


def state_errors(lm: HybridLM, states: compat.DynamicCache, true: compat.DynamicCache) -> list[float | None]:
    """Return the relative error of each linear layer's recurrent state, in layer order.

    ``||S - S_true|| / ||S_true||`` (Frobenius); 1 for a zero state, None for a layer that has no recurrent state.
    """
    return [_error(compat.states(states, layer)[1], compat.states(true, layer)[1]) for layer in _linear_layers(lm)]


def _linear_layers(lm: HybridLM) -> Iterator[int]:
    for group in lm.backbone.topology.groups:
        yield from group.stateful


def _error(state: torch.Tensor | None, true: torch.Tensor | None) -> float | None:
    if true is None:
        return None
    norm = float(true.float().norm())
    if norm == 0.0:
        return None
    error = 1.0 if state is None else float((state.float() - true.float()).norm()) / norm
    return min(error, WORST) if math.isfinite(error) else WORST
