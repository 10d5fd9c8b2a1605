"""Prompts with a common prefix: it is computed once, and each prompt goes on from an exact copy of its states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailreplay.engines.transformers.generation import Generation, prefill
from tailreplay.engines.transformers.results import GenerationResult, ReuseReport, Timings, report_of
from tailreplay.engines.transformers.sampling import Sampling
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse

if TYPE_CHECKING:
    from tailreplay.engines.transformers.lm import HybridLM


def generate_batch(
    lm: HybridLM, prompts: list[list[int]], reuse: Reuse, namespace: Namespace, sampling: Sampling, store: bool
) -> list[GenerationResult]:
    """Answer `prompts`, one after another, with their common prefix computed once."""
    # One token of each prompt must be left to run.
    shared = min(_common_prefix(prompts), min(map(len, prompts)) - 1)
    trunk = Trunk(lm, prompts[0], shared, reuse, namespace, store) if len(prompts) > 1 and shared else None
    try:
        return [Generation(lm, ids, reuse, namespace, sampling, store, None, trunk).finish() for ids in prompts]
    finally:
        if trunk is not None:
            trunk.close()


class Trunk:
    """The common prefix of a batch: computed at first use, then forked for each prompt."""

    def __init__(
        self, lm: HybridLM, ids: list[int], shared: int, reuse: Reuse, namespace: Namespace, store: bool
    ) -> None:
        self._lm = lm
        self._ids = ids
        self.shared = shared
        self._reuse, self._namespace, self._store = reuse, namespace, store
        self._computed: tuple[Sequence, ReuseReport] | None = None

    def fork(self, prompt_tokens: int, capacity: int, timings: Timings) -> tuple[Sequence, ReuseReport]:
        """Return a sequence that holds the common prefix, and how it came by it."""
        first = self._computed is None
        if self._computed is None:
            self._computed = self._compute(timings)
        sequence, report = self._computed
        return sequence.fork(capacity), report.with_shared(prompt_tokens, 0 if first else self.shared)

    def close(self) -> None:
        """Store what is left of the prefix."""
        if self._computed is not None:
            self._computed[0].finish()

    def _compute(self, timings: Timings) -> tuple[Sequence, ReuseReport]:
        lm = self._lm
        # One token more than is shared, so that a match may cover the whole prefix.
        ids = self._ids[: self.shared + 1]
        sequence, plan = lm.begin(ids, self._reuse, self._namespace, self.shared, self._store, timings)
        try:
            prefill(lm, sequence, ids[: self.shared], None)
        except BaseException:
            sequence.abandon()
            raise
        finally:
            sequence.wait_loaded()
            lm.cache.release(plan)
        timings.copy, timings.replay = sequence.copy_seconds, sequence.replay_seconds
        return sequence, report_of(plan)


def _common_prefix(sequences: list[list[int]]) -> int:
    first, *others = sequences
    for index, token in enumerate(first):
        if any(index >= len(other) or other[index] != token for other in others):
            return index
    return len(first)
