"""A running generation: prefill, sampling, text as it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from tailreplay.engines.transformers.results import GenerationResult, ReuseReport, Timings, report_of
from tailreplay.engines.transformers.sampling import Sampler, Sampling
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.engines.transformers.text import TextStream
from tailreplay.keys import Namespace
from tailreplay.modes import Reuse
from tailreplay.plan import ReplayPlan

if TYPE_CHECKING:
    from tailreplay.engines.transformers.batch import Trunk
    from tailreplay.engines.transformers.lm import HybridLM

# Answer tokens to make room for at first: a limit is often far above what an answer takes, and buffers grow.
_FIRST_ROOM = 1024


class Generation:
    """A running generation: iterate for pieces of text, then read `result`."""

    def __init__(
        self,
        lm: HybridLM,
        ids: list[int],
        reuse: Reuse,
        namespace: Namespace,
        sampling: Sampling,
        store: bool,
        cancel: threading.Event | None,
        trunk: Trunk | None = None,
    ) -> None:
        self._lm = lm
        self._ids = ids
        self._reuse = reuse
        self._namespace = namespace
        self._sampling = sampling
        self._store = store
        self._cancel = cancel
        self._trunk = trunk
        self._result: GenerationResult | None = None
        self._pieces: Generator[str, None, None] | None = None
        self._limit = sampling.max_new_tokens
        longest = lm.backbone.max_tokens
        if longest is not None:
            self._limit = min(self._limit, longest - len(ids))

    @property
    def result(self) -> GenerationResult:
        """The outcome, once the iteration has ended."""
        if self._result is None:
            raise RuntimeError("The generation has not ended: iterate to its end first.")
        return self._result

    def __iter__(self) -> Iterator[str]:
        if self._pieces is None:
            self._pieces = self._locked()
        return self._pieces

    def prefetch(self) -> None:
        """Bring its prompt's pages up from lower tiers while others run. On any thread, before the iteration begins."""
        if self._pieces is None:
            self._lm.prefetch(self._ids, self._reuse, self._namespace)

    def close(self) -> None:
        """End the generation where it is and let other requests run. Without effect on one that has ended."""
        if self._pieces is not None:
            self._pieces.close()

    def _locked(self) -> Generator[str, None, None]:
        begin = time.perf_counter()
        with self._lm.lock:
            yield from self._run(begin)

    def finish(self) -> GenerationResult:
        """Run to the end and return the result."""
        for _ in self:
            pass
        return self.result

    def _run(self, begin: float) -> Iterator[str]:
        lm, timings = self._lm, Timings()
        capacity = len(self._ids) + min(self._limit, _FIRST_ROOM)
        plan: ReplayPlan | None = None
        if self._trunk is not None:
            sequence, report = self._trunk.fork(len(self._ids), capacity, timings)
        else:
            sequence, plan = lm.begin(self._ids, self._reuse, self._namespace, capacity, self._store, timings)
            report = report_of(plan)
        try:
            yield from self._decode(sequence, report, timings, begin, plan)
            sequence.finish()
            if self._store and report.depth:
                lm.repairs.note(self._namespace, sequence.tokens, report.matched)
        finally:
            sequence.abandon()
            if plan is not None:
                sequence.wait_loaded()
                lm.cache.release(plan)

    def _decode(
        self, sequence: Sequence, report: ReuseReport, timings: Timings, begin: float, plan: ReplayPlan | None
    ) -> Iterator[str]:
        lm = self._lm
        stream = TextStream(lm.tokenizer, self._sampling.stop)
        sampler = Sampler(self._sampling, lm.backbone.device)
        ends = frozenset() if self._sampling.ignore_eos else end_tokens(lm.model)
        tokens: list[int] = []
        reason = "length"
        started = lm.clock.mark()
        logits = prefill(lm, sequence, self._ids, self._cancel)
        while logits is not None:
            token = sampler(logits)
            tokens.append(token)
            if len(tokens) == 1:
                timings.first_token = time.perf_counter() - begin
                timings.prefill = lm.clock.between(started, lm.clock.mark())
                if plan is not None:
                    # Not before: a clock of the device waits for what it times.
                    timings.copy, timings.replay = sequence.copy_seconds, sequence.replay_seconds
                    if plan.estimate is not None:
                        lm.pace.observe(plan.estimate, timings.copy, timings.replay, timings.prefill)
                    # The query has run, so every copy from the plan's pages has ended: others may evict them.
                    sequence.wait_loaded()
                    lm.cache.release(plan)
            if token in ends:
                reason = "stop"
                break
            piece = stream.push(token)
            if piece:
                yield piece
            if stream.stopped:
                reason = "stop"
                break
            if len(tokens) >= self._limit:
                break
            if self._cancel is not None and self._cancel.is_set():
                reason = "cancelled"
                break
            if len(tokens) == 1:
                # The states at the prompt's end: not earlier, since somebody waits for the first token.
                sequence.save_states()
            logits = sequence.extend([token])
        else:
            reason = "cancelled"
        rest = stream.flush()
        if rest:
            yield rest
        timings.total = time.perf_counter() - begin
        self._result = GenerationResult(stream.text, tokens, reason, report, timings)


def prefill(lm: HybridLM, sequence: Sequence, ids: list[int], cancel: threading.Event | None) -> torch.Tensor | None:
    """Run what is left of `ids` in chunks, and store the states after each but the last; None if cancelled meanwhile."""
    logits = None
    while len(sequence.tokens) < len(ids):
        if cancel is not None and cancel.is_set():
            return None
        start = len(sequence.tokens)
        stop = min(start + lm.prefill_chunk, len(ids))
        if lm.anchor_interval:
            stop = min(stop, (start // lm.anchor_interval + 1) * lm.anchor_interval)
        logits = sequence.extend(ids[start:stop])
        if stop < len(ids):
            sequence.save_states()
    return logits


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end an answer, by the generation config."""
    end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)
