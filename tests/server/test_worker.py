"""The queue by itself, with generations that do as they are told."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tailreplay.engines.transformers.results import GenerationResult, ReuseReport
from tailreplay.metrics import Metrics
from tailreplay.server.errors import ClosingError, QueueFullError
from tailreplay.server.service import to_loop
from tailreplay.server.worker import Ended, Event, Finished, Job, Piece, Worker

REPORT = ReuseReport(5, 0, 0, "replay", 0.05, True, "exact", 0, "unseen_prefix", "unseen")


class Scripted:
    """A generation of two pieces that begins when it is let go."""

    def __init__(self, cancelled: threading.Event, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self._cancelled = cancelled
        self._error = error
        self.result: GenerationResult | None = None
        self.prefetched = threading.Event()

    def prefetch(self) -> None:
        self.prefetched.set()

    def __iter__(self) -> Iterator[str]:
        self.begun.set()
        assert self.go.wait(60)
        if self._error is not None:
            raise self._error
        yield "a"
        if not self._cancelled.is_set():
            yield "b"
        self.result = GenerationResult("ab", [1, 2], "cancelled" if self._cancelled.is_set() else "length", REPORT)


class Sent:
    """A job with its script and the events that came of it; each event that is a `refuse` is refused with an error."""

    def __init__(self, error: Exception | None = None, count: int = 1, refuse: type[Event] | None = None) -> None:
        cancelled = threading.Event()
        self.scripts = [Scripted(cancelled, error) for _ in range(count)]
        self._events: queue.Queue[Event] = queue.Queue()
        generations: Any = self.scripts
        self.job = Job(generations, cancelled, self._take)
        self._refuse = refuse

    def _take(self, event: Event) -> None:
        if self._refuse is not None and isinstance(event, self._refuse):
            raise RuntimeError("Event loop is closed")
        self._events.put(event)

    def let_go(self) -> None:
        for script in self.scripts:
            script.go.set()

    def events(self) -> list[Event]:
        """All events, once the last has come."""
        out = [self._events.get(timeout=60)]
        while not isinstance(out[-1], Ended):
            out.append(self._events.get(timeout=60))
        assert self._events.empty()
        return out

    def outcome(self) -> str:
        last = self.events()[-1]
        assert isinstance(last, Ended)
        return last.outcome


@pytest.fixture
def start() -> Iterator[Callable[[int], Worker]]:
    workers: list[Worker] = []

    def make(max_queue: int) -> Worker:
        workers.append(Worker(Metrics(), max_queue))
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
        worker.join()


def test_events_of_a_job(start: Callable[[int], Worker]) -> None:
    worker, sent = start(0), Sent(count=2)
    worker.submit(sent.job)
    sent.let_go()
    kinds = [(type(event), getattr(event, "index", None)) for event in sent.events()]
    assert kinds == [(Piece, 0), (Piece, 0), (Finished, 0), (Piece, 1), (Piece, 1), (Finished, 1), (Ended, None)]


def test_first_in_first_out(start: Callable[[int], Worker]) -> None:
    worker, jobs = start(3), [Sent() for _ in range(4)]
    for sent in jobs:
        worker.submit(sent.job)
    for sent, after in zip(jobs, [*jobs[1:], None], strict=True):
        assert sent.scripts[0].begun.wait(60)
        assert after is None or not after.scripts[0].begun.is_set()
        sent.let_go()
        assert sent.outcome() == "completed"


def test_what_waits_is_prefetched_and_what_runs_at_once_is_not(start: Callable[[int], Worker]) -> None:
    worker, first, second = start(1), Sent(), Sent(count=2)
    worker.submit(first.job)
    assert first.scripts[0].begun.wait(60)
    worker.submit(second.job)
    assert all(script.prefetched.wait(60) for script in second.scripts)
    assert not first.scripts[0].prefetched.is_set()
    for sent in (first, second):
        sent.let_go()
        assert sent.outcome() == "completed"


def test_bound_counts_those_that_wait(start: Callable[[int], Worker]) -> None:
    worker, first, second = start(1), Sent(), Sent()
    worker.submit(first.job)
    worker.submit(second.job)
    with pytest.raises(QueueFullError):
        worker.submit(Sent().job)
    worker.cancel(second.job)
    assert second.outcome() == "cancelled"
    third = Sent()
    worker.submit(third.job)
    for sent in (first, third):
        sent.let_go()
        assert sent.outcome() == "completed"


def test_no_queue_takes_one_at_a_time(start: Callable[[int], Worker]) -> None:
    worker = start(0)
    for _ in range(20):
        sent = Sent()
        worker.submit(sent.job)
        with pytest.raises(QueueFullError):
            worker.submit(Sent().job)
        sent.let_go()
        assert sent.outcome() == "completed"


def test_cancelling_what_runs_and_what_has_ended(start: Callable[[int], Worker]) -> None:
    worker, sent = start(0), Sent(count=2)
    worker.submit(sent.job)
    assert sent.scripts[0].begun.wait(60)
    worker.cancel(sent.job)
    sent.let_go()
    assert sent.outcome() == "cancelled"
    assert not sent.scripts[1].begun.is_set()
    worker.cancel(sent.job)
    assert worker.waiting == worker.running == 0


def test_failure_ends_one_request_only(start: Callable[[int], Worker]) -> None:
    worker, bad, good = start(1), Sent(RuntimeError("broken")), Sent()
    worker.submit(bad.job)
    worker.submit(good.job)
    for sent, outcome in ((bad, "failed"), (good, "completed")):
        sent.let_go()
        assert sent.outcome() == outcome


class Unfinished(Scripted):
    """Ends without a result."""

    @property
    def result(self) -> GenerationResult:
        raise RuntimeError("no result")

    @result.setter
    def result(self, _: GenerationResult | None) -> None: ...


def answers(worker: Worker) -> bool:
    """Whether the worker still runs jobs."""
    sent = Sent()
    sent.let_go()
    worker.submit(sent.job)
    return sent.outcome() == "completed"


def test_no_result_is_a_failure(start: Callable[[int], Worker]) -> None:
    worker, sent = start(1), Sent()
    generations: Any = [Unfinished(sent.job.cancelled)]
    sent.job.generations = generations
    generations[0].go.set()
    worker.submit(sent.job)
    assert sent.outcome() == "failed"
    assert answers(worker)


@pytest.mark.parametrize("name", ["prompt", "answer"])
def test_answer_that_cannot_be_counted_fails(
    start: Callable[[int], Worker], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    worker, sent = start(1), Sent()
    with monkeypatch.context() as broken:
        broken.setattr(Metrics, name, fail)
        sent.let_go()
        worker.submit(sent.job)
        assert sent.outcome() == "failed"
    assert answers(worker)


def test_end_that_cannot_be_counted_is_told(start: Callable[[int], Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, sent = start(1), Sent()
    with monkeypatch.context() as broken:
        broken.setattr(Metrics, "request", fail)
        sent.let_go()
        worker.submit(sent.job)
        assert sent.outcome() == "completed"
    assert answers(worker)


@pytest.mark.parametrize("refuse", [Piece, Finished])
def test_client_that_refuses_an_answer_is_told_the_end(start: Callable[[int], Worker], refuse: type[Event]) -> None:
    worker, sent = start(1), Sent(refuse=refuse)
    sent.let_go()
    worker.submit(sent.job)
    assert sent.outcome() == "failed"
    assert answers(worker)


def test_client_that_refuses_the_end_holds_nobody_up(start: Callable[[int], Worker]) -> None:
    worker, running, waiting, last = start(3), Sent(refuse=Ended), Sent(refuse=Ended), Sent()
    worker.submit(running.job)
    running.let_go()
    assert answers(worker)
    blocking = Sent()
    for sent in (blocking, waiting, last):
        worker.submit(sent.job)
    assert blocking.scripts[0].begun.wait(60)
    worker.close()
    blocking.let_go()
    assert [blocking.outcome(), last.outcome()] == ["closing", "closing"]


def test_nothing_is_taken_while_the_thread_does_not_run() -> None:
    worker = Worker(Metrics(), 1)
    with pytest.raises(ClosingError):
        worker.submit(Sent().job)
    assert worker.waiting == 0


def test_events_for_a_loop_that_closes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin() -> tuple[asyncio.AbstractEventLoop, Callable[[Event], None]]:
        return asyncio.get_running_loop(), to_loop(asyncio.Queue())

    loop, emit = asyncio.run(begin())
    with monkeypatch.context() as meanwhile:
        # As it would have answered a moment before it closed.
        meanwhile.setattr(loop, "is_closed", lambda: False)
        emit(Ended("closing"))


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("broken")


def test_closing_ends_all(start: Callable[[int], Worker]) -> None:
    worker, first, second = start(1), Sent(), Sent()
    worker.submit(first.job)
    worker.submit(second.job)
    assert first.scripts[0].begun.wait(60)
    worker.close()
    assert second.outcome() == "closing"
    first.let_go()
    assert first.outcome() == "closing"
    with pytest.raises(ClosingError):
        worker.submit(Sent().job)
    worker.join()
    assert not worker.alive


def test_closing_is_one_outcome() -> None:
    metrics = Metrics()
    worker, first, second = Worker(metrics, 1), Sent(), Sent()
    worker.start()
    worker.submit(first.job)
    worker.submit(second.job)
    assert first.scripts[0].begun.wait(60)
    worker.close()
    first.let_go()
    worker.join()
    assert b'tailreplay_requests_total{outcome="closing"} 2.0' in metrics.render()


def test_what_has_least_priority_runs_between_jobs_and_makes_room() -> None:
    rests: queue.Queue[str] = queue.Queue()
    may_end = threading.Semaphore(0)
    failures: list[type[BaseException]] = [RuntimeError, KeyboardInterrupt, RuntimeError]

    def idle(wanted: Callable[[], bool]) -> None:
        rests.put("begun")
        assert may_end.acquire(timeout=60)
        rests.put("wanted" if wanted() else "done")
        raise failures.pop()("what goes wrong there is nobody's concern")

    worker = Worker(Metrics(), 3, idle)
    worker.start()
    try:
        assert rests.get(timeout=60) == "begun"
        first, second = Sent(), Sent()
        first.let_go()
        worker.submit(first.job)
        may_end.release()
        assert rests.get(timeout=60) == "wanted"
        assert first.outcome() == "completed"
        assert rests.get(timeout=60) == "begun"
        may_end.release()
        assert rests.get(timeout=60) == "done"
        # Once, however long nobody comes.
        second.let_go()
        worker.submit(second.job)
        assert second.outcome() == "completed"
        assert rests.get(timeout=60) == "begun"
        may_end.release()
        assert rests.get(timeout=60) == "done"
        assert worker.alive
    finally:
        may_end.release()
        worker.close()
        worker.join()
    assert rests.empty()
