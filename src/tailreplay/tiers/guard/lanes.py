"""Threads that run calls which may never return, for callers that will not wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Overdue(Exception):
    """A call did not return within its deadline; or, of `Lanes.take`, all lanes are in use."""


class _Job:
    def __init__(self, call: Callable[[], Any], late: Callable[[], None] | None) -> None:
        self.call = call
        self.late = late
        self.abandoned = False
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Lanes:
    """At most `count` threads; one whose call hangs counts until the call returns.

    The threads are daemons: a call that hangs for ever does not keep the process from ending.

    Parameters
    ----------
    name : str
        For the threads' names.
    count : int
        How many there may be.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._alive = 0
        self._hung = 0
        self._closed = False

    @property
    def hung(self) -> int:
        """Lanes in a call that somebody has given up on."""
        return self._hung

    def take(self, seconds: float) -> Lane:
        """Return a lane for the caller alone, to be given back with `Lane.free`.

        Raises
        ------
        Overdue
            If none is free within `seconds`, or no thread can be started.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or self._alive < self.count, seconds):
                raise Overdue
            if self._idle:
                return Lane(self, self._idle.pop())
            self._alive += 1
        try:
            return Lane(self, _Worker(self))
        except RuntimeError:
            self._ended()
            raise Overdue from None

    def close(self) -> None:
        """End the threads, each as soon as it is idle. Waits for none of them."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.jobs.put(None)

    def _give_back(self, worker: _Worker) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(worker)
                self._changed.notify()
                return
        worker.jobs.put(None)

    def _ended(self) -> None:
        with self._changed:
            self._alive -= 1
            self._changed.notify()


class Lane:
    """The use of one thread, for one call at a time. Made by `Lanes.take`; used by one caller."""

    def __init__(self, lanes: Lanes, worker: _Worker) -> None:
        self._lanes = lanes
        self._worker = worker
        self._given_up = False

    def run(self, call: Callable[[], T], seconds: float, late: Callable[[], None] | None = None) -> T:
        """Return what `call` returns, or raise what it raises.

        Parameters
        ----------
        seconds : float
            How long to wait.
        late : callable, optional
            Run on the lane if the call returns after that; what it returned is let go of, and given to nobody.

        Raises
        ------
        Overdue
            If `call` has not returned. The lane is not the caller's any more.
        """
        job = _Job(call, late)
        self._worker.jobs.put(job)
        if not job.done.wait(seconds):
            with self._lanes._changed:
                # It may have ended between the wait and the lock.
                if not job.done.is_set():
                    job.abandoned = self._given_up = True
                    self._lanes._hung += 1
                    raise Overdue
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None
        return cast(T, job.result)

    @property
    def given_up(self) -> bool:
        """Whether it is not the caller's any more."""
        return self._given_up

    def free(self) -> None:
        """Give the thread back, once. After `Overdue` it does nothing: the thread comes back when its call returns."""
        if not self._given_up:
            self._given_up = True
            self._lanes._give_back(self._worker)


class _Worker:
    """A thread that does one job after another until it finds None."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, name=f"tailreplay-{lanes.name}", daemon=True).start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            self._do(job)
            # Not held until the next one comes: it may refer to a page.
            del job
        self._lanes._ended()

    def _do(self, job: _Job) -> None:
        result, error = None, None
        try:
            result = job.call()
        except BaseException as raised:
            error = raised
        with self._lanes._changed:
            if not job.abandoned:
                job.result, job.error = result, error
                job.done.set()
                return
        del result, error
        self._return_late(job)

    def _return_late(self, job: _Job) -> None:
        # Whoever asked has been told of the time-out; nobody is left to hear of an error.
        with contextlib.suppress(BaseException):
            if job.late is not None:
                job.late()
        with self._lanes._changed:
            self._lanes._hung -= 1
        self._lanes._give_back(self)
