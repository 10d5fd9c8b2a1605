"""Measures documents in worker processes, each with the model loaded once, and appends what they find."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tailreplay.errors import TailReplayError
from tailreplay.evals.document import Document
from tailreplay.evals.plan import EvalPlan
from tailreplay.evals.records import Record

Job = tuple[str, int, int]
"""Task, length and the document's number."""


class Measurer:
    """The model with what is measured on it.

    Parameters
    ----------
    plan : EvalPlan
    threads : int or None
        Of torch, in this process; None leaves them as they are.
    """

    def __init__(self, plan: EvalPlan, threads: int | None = None) -> None:
        from tailreplay.engines.transformers.quiet import quiet_library

        quiet_library()
        import torch

        from tailreplay.cache import PrefixCache
        from tailreplay.engines.transformers import HybridLM
        from tailreplay.evals.measure import Asker
        from tailreplay.evals.turns import Talker
        from tailreplay.sizes import parse_bytes
        from tailreplay.storage import Storage

        if threads is not None:
            torch.set_num_threads(threads)
        self._plan = plan
        cache = PrefixCache(plan.host_bytes, storage=Storage(host_codec=plan.codec, anchor_bytes=0))
        # Graphs would lengthen tails, and what is measured here is what a tail of just so many tokens is worth.
        self.lm = HybridLM.from_pretrained(plan.model, cache=cache, dtype=plan.dtype, device=plan.device, cuda_graphs=0)
        methods = plan.chosen_methods()
        self._material = plan.material()
        self._tasks = {task.info.name: task for task in plan.chosen_tasks()}
        self._asker = Asker(self.lm, methods, parse_bytes(plan.batch_bytes))
        self._talker = Talker(self.lm, methods)
        self._head = tuple(self.lm.tokenizer.encode(""))  # what the tokenizer puts before every prompt, if anything

    def document(self, job: Job) -> Document:
        """Write a document."""
        name, length, index = job
        whole = self._tasks[name].document(length, index, self._plan.seed, self._material, self._encode, self._head)
        return whole.thinned(self._plan.hits) if self._plan.hits else whole

    def measure(self, job: Job) -> Record:
        """Write a document, ask everything and return the record."""
        name, length, index = job
        document = self.document(job)
        hits = self._talker.measure(document) if document.turns else self._asker.measure(document)
        return {"task": name, "length": length, "document": index, "hits": hits}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.lm.tokenizer.encode(text, add_special_tokens=False)
        return ids


def measured(plan: EvalPlan, jobs: list[Job], workers: int, own: Measurer | None) -> Iterator[Record]:
    """Yield records as they are ready.

    Parameters
    ----------
    jobs : list
        In the order in which they begin.
    workers : int
        Processes, if there is no `own`.
    own : Measurer, optional
        Runs everything in this process.

    Raises
    ------
    TailReplayError
        If a process dies. What was measured before has been yielded.
    """
    if own is not None:
        yield from map(own.measure, jobs)
        return
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, context, _begin, (plan, threads)) as pool:
        yield from collected(pool.submit, jobs, 2 * workers)


def collected(submit: Callable[..., Future[Record]], jobs: list[Job], ahead: int) -> Iterator[Record]:
    """Keep a few jobs waiting, not all of them: stopping is quick then."""
    waiting = iter(jobs)
    running = {submit(_measure, job) for job, _ in zip(waiting, range(ahead), strict=False)}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            # Those that ended well first: a process that died takes nobody else's work with it.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                result = future.result()
                job = next(waiting, None)
                if job is not None:
                    running.add(submit(_measure, job))
                yield result
    except BrokenProcessPool as error:
        raise TailReplayError(
            "A worker process died, perhaps for lack of memory: what was measured is kept, go on with fewer --workers."
        ) from error
    finally:
        for future in running:
            future.cancel()


_worker: Measurer | None = None


def _begin(plan: EvalPlan, threads: int) -> None:
    global _worker
    # Ctrl-C ends a worker at once, not after the documents that wait for it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _worker = Measurer(plan, threads)


def _measure(job: Job) -> Any:
    assert _worker is not None
    return _worker.measure(job)
