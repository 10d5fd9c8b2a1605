"""The queue by itself, with generations that do as they are told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tailreplay.engines.transformers.results import GenerationResult, ReuseReport
from tailreplay.metrics import Metrics
from tailreplay.server.errors import ClosingError, QueueFullError
from tailreplay.server.worker import Ended, Event, Finished, Job, Piece, Worker

REPORT = ReuseReport(5, 0, 0, "replay", 0.05, True, "exact", "unseen_prefix", "unseen")


class Scripted:
    """A generation of two pieces that begins when it is let go."""

    def __init__(self, cancelled: threading.Event, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self._cancelled = cancelled
        self._error = error
        self.result: GenerationResult | None = None

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
    """A job with its script and the events that came of it."""

    def __init__(self, error: Exception | None = None, count: int = 1) -> None:
        cancelled = threading.Event()
        self.scripts = [Scripted(cancelled, error) for _ in range(count)]
        self._events: queue.Queue[Event] = queue.Queue()
        generations: Any = self.scripts
        self.job = Job(generations, cancelled, self._events.put)

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
