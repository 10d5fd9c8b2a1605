"""One method over one model: a context is computed once, exactly, and every question about it comes after a hit on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from tailreplay.engines.transformers import GenerationResult, HybridLM
from tailreplay.engines.transformers.results import ReuseReport, Timings, report_of
from tailreplay.engines.transformers.sequence import Sequence
from tailreplay.errors import CacheConfigError
from tailreplay.evals.lm_eval.methods import Method
from tailreplay.evals.lm_eval.prompts import Prompt
from tailreplay.evals.lm_eval.scoring import Score, score
from tailreplay.modes import Reuse

_OFF = Reuse("off", None)


class Runner:
    """Answers and scores prompts. Nothing that comes after a hit is stored, so no question sees another.

    Parameters
    ----------
    lm : HybridLM
    method : Method

    Attributes
    ----------
    contexts : int
        Contexts computed so far.
    """

    def __init__(self, lm: HybridLM, method: Method) -> None:
        self.lm = lm
        self.method = method
        self.contexts = 0
        self._context: list[int] = []
        self._salt = ""

    def generate(self, prompt: Prompt, max_new_tokens: int, stop: list[str]) -> GenerationResult:
        """Answer a prompt greedily."""
        reuse = self._prepare(prompt)
        result = self.lm.generate(
            prompt.ids,
            replay=reuse,
            salt=self._salt,
            store=False,
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            stop=stop,
        )
        self._check(result.reuse, prompt.cached)
        return result

    def score(self, prompt: Prompt, continuation: list[int]) -> tuple[Score, ReuseReport]:
        """Score the tokens of a continuation after a prompt."""
        reuse = self._prepare(prompt)
        ids = prompt.ids + continuation
        with self._opened(ids[:-1], reuse, store=False) as (sequence, report):
            self._check(report, prompt.cached)
            return score(sequence, ids, len(prompt.ids), self.lm.prefill_chunk), report

    def score_window(self, ids: list[int], first: int) -> tuple[Score, ReuseReport]:
        """Score ``ids[first:]``. The window's first half is the context: scored while it is computed, then reused."""
        half = (len(ids) - 1) // 2  # of the tokens that are run: the last is only predicted
        if self.method.name == "full" or half == 0:
            return self.score(Prompt(ids[:first], 0), ids[first:])
        self._new_context(ids[:half])
        with self._opened(ids[:half], _OFF, store=True) as (sequence, _):
            before = score(sequence, ids[: half + 1], first, self.lm.prefill_chunk)
        with self._opened(ids[:-1], self.method.reuse, store=False) as (sequence, report):
            self._check(report, half)
            after = score(sequence, ids, max(first, half + 1), self.lm.prefill_chunk)
        return before + after, report

    def _prepare(self, prompt: Prompt) -> Reuse:
        """Have the prompt's context in the cache, and say how to reuse it."""
        if self.method.name == "full" or prompt.cached == 0:
            return _OFF
        context = prompt.ids[: prompt.cached]
        if context != self._context:
            self._new_context(context)
            self.lm.generate(context, replay=_OFF, salt=self._salt, max_new_tokens=1, temperature=0.0)
        return self.method.reuse

    def _new_context(self, context: list[int]) -> None:
        # A salt for each context: a hit on it ends where it ends, and not in what another has in common with the question.
        self._context, self._salt = context, uuid4().hex
        self.contexts += 1

    @contextmanager
    def _opened(self, ids: list[int], reuse: Reuse, store: bool) -> Iterator[tuple[Sequence, ReuseReport]]:
        """Begin a sequence with what is reused of `ids`, and end it."""
        lm = self.lm
        with lm.lock:
            sequence, plan = lm.begin(ids, reuse, lm.namespace(self._salt), len(ids), store, Timings())
            try:
                yield sequence, report_of(plan)
                sequence.finish()
            finally:
                sequence.abandon()
                sequence.wait_loaded()
                lm.cache.release(plan)

    def _check(self, report: ReuseReport, cached: int) -> None:
        """A context that was not reused whole would be a measurement of something else."""
        if report.mode != "off" and report.matched != cached:
            raise CacheConfigError(
                f"Only {report.matched} of a context's {cached} tokens could be reused: the cache of "
                f"{self.lm.cache.host_bytes} bytes is too small for it."
            )
