"""One document in the cache, its true states at each boundary, and the states that a method rebuilds there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tailreplay.engines.transformers import HybridLM, compat
from tailreplay.engines.transformers.results import Timings
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.engines.transformers.staging import Staging
from tailreplay.errors import CacheConfigError
from tailreplay.evals.branches import KeysValues
from tailreplay.evals.document import Document, Hit
from tailreplay.evals.start_rules import Start
from tailreplay.evals.starts import rebuild
from tailreplay.evals.trail import Trail, stateful_layers
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
    trail: Trail


class Prefix:
    """Runs a document once, as a first request would, and answers what its hits start from.

    Parameters
    ----------
    lm : HybridLM
        Its cache is emptied for each document.
    document : Document
    starts : iterable of Start
        What states will be rebuilt from, besides zero: the anchors that they need are kept on the way.
    """

    def __init__(self, lm: HybridLM, document: Document, starts: Iterable[Start] = ()) -> None:
        self._lm = lm
        self._document = document
        self._starts = [start for start in starts if start.anchored]
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
            hits = self._document.hits
            anchors = [anchor for hit in hits for anchor in self._anchors(hit) if anchor <= hit.at]
            trail = Trail(lm.backbone, anchors, any(start.uses_gates for start in self._starts))
            for hit in hits:
                self._extend(sequence, ids[: hit.at], trail)
                branch, path = sequence, trail
                if hit.extra:
                    branch, path = sequence.fork(hit.matched), trail.fork(self._anchors(hit))
                    self._extend(branch, [*ids[: hit.at], *hit.extra], path)
                    branch.finish()
                found.append(Boundary(hit, list(branch.tokens), self._snapshot(branch), path))
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

    @torch.inference_mode()
    def start(
        self, boundary: Boundary, start: Start, kv: KeysValues, mean: compat.DynamicCache | None = None
    ) -> compat.DynamicCache:
        """Rebuild the boundary's states from another start than zero, over the hiddens that are in the cache.

        Parameters
        ----------
        kv : list of (keys, values)
            As `restore` returns them.
        mean : DynamicCache, optional
            The model's mean state, where `start` uses it.

        Raises
        ------
        CacheConfigError
            If the cache is too small for the document.
        """
        lm, ids = self._lm, boundary.ids
        asked = [*ids, boundary.hit.probes[0].query[0]]
        with lm.lock:
            every_hidden = parse_reuse("replay", 1.0, 0)
            plan = lm.cache.lookup(asked, self._namespace, every_hidden, lm.backbone.topology, lm.backbone.costs)
            try:
                whole_hit(plan.matched, len(ids), plan.miss_reason or plan.stop)
                read = Staging(lm.cache.fetch(plan), lm.backbone.layout, lm.backbone.device, []).hidden
                rebuilt = rebuild(lm.backbone, start, ids, boundary.trail, kv, read, lm.prefill_chunk, mean)
                return self._states(rebuilt)
            finally:
                lm.cache.release(plan)

    def _anchors(self, hit: Hit) -> list[int]:
        return [start.anchor_of(hit.matched) for start in self._starts]

    def _extend(self, sequence: Sequence, ids: list[int], trail: Trail) -> None:
        chunk = self._lm.prefill_chunk
        with trail.watching():
            while (begin := len(sequence.tokens)) < len(ids):
                sequence.extend(ids[begin : trail.stop(begin, min(begin + chunk, len(ids)))])
                trail.passed(len(sequence.tokens), sequence.past)

    def _snapshot(self, sequence: Sequence) -> compat.DynamicCache:
        """Return the states alone: keys and values are in the cache."""
        return self._states(sequence.past)

    def _states(self, past: compat.DynamicCache) -> compat.DynamicCache:
        states = compat.new_cache(self._lm.backbone.config)
        compat.copy_states(past, states)
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
    layers = stateful_layers(lm.backbone)
    return [_error(compat.states(states, layer)[1], compat.states(true, layer)[1]) for layer in layers]


def squared_errors(lm: HybridLM, states: compat.DynamicCache, true: compat.DynamicCache) -> list[float]:
    """Return ``||S - S_true||^2`` of each head, layer by layer; ``||S_true||^2`` if `states` is empty."""
    found: list[float] = []
    for layer in stateful_layers(lm.backbone):
        state, wanted = compat.states(states, layer)[1], compat.states(true, layer)[1]
        if wanted is not None:
            error = wanted.float() if state is None else state.float() - wanted.float()
            found += error[0].flatten(1).square().sum(1).tolist()
    return found


def _error(state: torch.Tensor | None, true: torch.Tensor | None) -> float | None:
    if true is None:
        return None
    norm = float(true.float().norm())
    if norm == 0.0:
        return None
    error = 1.0 if state is None else float((state.float() - true.float()).norm()) / norm
    return min(error, WORST) if math.isfinite(error) else WORST
