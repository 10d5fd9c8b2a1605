"""One thread that runs requests in the order they came: the transformers engine is single-stream."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from tailreplay.engines.transformers.generation import Generation
from tailreplay.engines.transformers.results import GenerationResult
from tailreplay.metrics import Metrics
from tailreplay.server.errors import ClosingError, QueueFullError

log = logging.getLogger("tailreplay.server")
Outcome = Literal["completed", "cancelled", "failed", "closing"]


@dataclass(frozen=True)
class Piece:
    """Text of the `index`-th prompt's answer, as it comes."""

    index: int
    text: str


@dataclass(frozen=True)
class Finished:
    """The `index`-th prompt's answer is complete."""

    index: int
    result: GenerationResult


@dataclass(frozen=True)
class Ended:
    """The last event of every job."""

    outcome: Outcome


Event = Piece | Finished | Ended


@dataclass(eq=False)
class Job:
    """A request: generations to run one after another.

    Attributes
    ----------
    generations : sequence of Generation
        All made with `cancelled`.
    cancelled : threading.Event
        Set by `Worker.cancel`.
    emit : callable
        Takes each event, on any thread; must not block or raise.
    submitted, started : float
        Seconds of the monotonic clock.
    """

    generations: Sequence[Generation]
    cancelled: threading.Event
    emit: Callable[[Event], None]
    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0

    @property
    def queued(self) -> float:
        """Seconds that it waited."""
        return self.started - self.submitted


class Worker:
    """First in, first out; every submitted job ends with exactly one `Ended`. Thread-safe.

    Parameters
    ----------
    metrics : Metrics
        Counts outcomes and answers.
    max_queue : int
        Jobs that may wait beside the one that runs.
    idle : callable, optional
        ``idle(wanted)`` is called at the beginning and after jobs, when none waits. It should return soon after
        ``wanted()`` has become true.
    """

    def __init__(
        self, metrics: Metrics, max_queue: int, idle: Callable[[Callable[[], bool]], object] | None = None
    ) -> None:
        self.max_queue = max_queue
        self._idle = idle
        self._metrics = metrics
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._current: Job | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="tailreplay-worker", daemon=True)
        self._prefetches = ThreadPoolExecutor(1, "tailreplay-prefetch")
        metrics.watch_queue(lambda: self.waiting, lambda: self.running)

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        with self._changed:
            return len(self._waiting)

    @property
    def running(self) -> int:
        """1 while a job runs, else 0."""
        with self._changed:
            return int(self._current is not None)

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return self._thread.is_alive() and not self._closed

    def start(self) -> None:
        """Begin to run jobs."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue.

        Raises
        ------
        QueueFullError
            If `max_queue` jobs wait already.
        ClosingError
            After `close`, and whenever the thread does not run.
        """
        with self._changed:
            if not self.alive:
                raise ClosingError
            # A job that the thread has not picked up yet does not wait for another one.
            if len(self._waiting) + (self._current is not None) > self.max_queue:
                raise QueueFullError(self.max_queue)
            self._waiting.append(job)
            self._changed.notify_all()
            waits = self._current is not None
        if waits:
            with suppress(RuntimeError):  # closed meanwhile
                self._prefetches.submit(self._prefetch, job)

    def cancel(self, job: Job) -> None:
        """End a job: at once if it waits, at the next step if it runs, not at all if it has ended."""
        job.cancelled.set()
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        self._end(job, "cancelled")

    def close(self) -> None:
        """End every job and take no more; does not wait. A second call does nothing."""
        with self._changed:
            self._closed = True
            jobs = list(self._waiting)
            self._waiting.clear()
            if self._current is not None:
                self._current.cancelled.set()
            self._changed.notify_all()
        self._prefetches.shutdown(wait=False, cancel_futures=True)
        for job in jobs:
            self._end(job, "closing")

    def join(self) -> None:
        """Wait until the thread has ended, after `close`."""
        if self._thread.ident is not None:
            self._thread.join()

    def _prefetch(self, job: Job) -> None:
        """Bring up what lower tiers hold for a job that waits. On a thread of its own."""
        try:
            for generation in job.generations:
                if job.started or job.cancelled.is_set():
                    return
                generation.prefetch()
        except Exception:
            log.exception("Prefetching failed; the request is not affected.")

    # ---- on the worker's thread

    def _loop(self) -> None:
        rested = False
        while True:
            with self._changed:
                if not self._waiting and not self._closed:
                    if rested or self._idle is None:
                        self._changed.wait()
                        continue
                    job = None
                elif self._closed:
                    return
                else:
                    job = self._current = self._waiting.popleft()
            rested = job is None
            if job is None:
                self._rest()
                continue
            outcome: Outcome = "failed"
            try:
                job.started = time.perf_counter()
                outcome = self._run(job)
            except BaseException:
                # Of any kind: a thread that ended here would leave this client and all later ones without an answer.
                log.exception("A request failed.")
            with self._changed:
                # Free before its client can know, so that a next request of that client finds the place empty.
                self._current = None
                if outcome == "cancelled" and self._closed:
                    outcome = "closing"
            self._end(job, outcome)

    def _rest(self) -> None:
        """Let what has least priority run until a job comes."""
        assert self._idle is not None
        try:
            self._idle(lambda: bool(self._waiting) or self._closed)
        except BaseException:
            # Of any kind, as with requests: the thread must go on.
            log.exception("Work between requests failed; requests are not affected.")

    def _run(self, job: Job) -> Outcome:
        for index, generation in enumerate(job.generations):
            if job.cancelled.is_set():
                return "cancelled"
            for text in generation:
                job.emit(Piece(index, text))
            result = generation.result
            self._record(job, result)
            if result.finish_reason == "cancelled":
                return "cancelled"
            job.emit(Finished(index, result))
        return "completed"

    def _record(self, job: Job, result: GenerationResult) -> None:
        reuse = result.reuse
        self._metrics.prompt(
            reuse.prompt_tokens, reuse.matched, reuse.replayed, exact=reuse.exact, miss_reason=reuse.miss_reason
        )
        if result.tokens:
            self._metrics.answer(len(result.tokens), job.queued + result.timings.first_token)
        cached = f"{reuse.matched} from the cache ({reuse.mode}, {reuse.replayed} replayed, {reuse.provenance})"
        log.info(
            "%d prompt tokens, %s; first token after %.0f ms%s; %d tokens, %s",
            reuse.prompt_tokens,
            f"none from the cache ({reuse.miss_reason})" if reuse.miss_reason else cached,
            1000 * result.timings.first_token,
            f" and {1000 * job.queued:.0f} ms in the queue" if job.queued > 0.01 else "",
            len(result.tokens),
            result.finish_reason,
        )

    def _end(self, job: Job, outcome: Outcome) -> None:
        try:
            try:
                self._metrics.request(outcome)
            finally:
                job.emit(Ended(outcome))
        except Exception:
            # Other jobs are still to be run, or to be ended as well.
            log.exception("The end of a request could not be told.")
