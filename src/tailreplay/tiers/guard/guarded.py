"""Keeps requests going when a tier hangs or fails: deadlines, a back-off, and counters."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from tailreplay.tiers.base import Found, Tier, TierError, TierFullError, TierPage, Usage
from tailreplay.tiers.batches import by_bytes, by_count
from tailreplay.tiers.guard.health import Health
from tailreplay.tiers.guard.lanes import Lane, Lanes, Overdue

T = TypeVar("T")
CLOSE_SECONDS = 5.0
_KEYS = 512
_END = object()
_log = logging.getLogger("tailreplay.tiers")


@dataclass(slots=True)
class Counts:
    """What became of the calls of one method.

    Attributes
    ----------
    calls : int
        Round trips that were begun. A batch may be several.
    failures : int
        Of them those that did not succeed, time-outs included.
    timeouts : int
        Of them those that did not return within the deadline.
    refused : int
        Calls that were answered at once because the tier was down or all threads were busy; not among `calls`.
    seconds : float
        Time that callers waited.
    nbytes : int
        Of pages that were read or written.
    """

    calls: int = 0
    failures: int = 0
    timeouts: int = 0
    refused: int = 0
    seconds: float = 0.0
    nbytes: int = 0


class Guarded:
    """A tier that never keeps its caller longer than a deadline, and is left alone for a while after it failed.

    After a time-out or an error (but for `TierFullError`) the tier is down for a second, then for two, and so on up to a
    minute: calls raise `TierError` at once. Then one call tries it again; the first success ends it. A call that hangs
    stays on its thread; what it returns is given to nobody, and the buffers of a hanging `put` may change under it, which
    checksums tell.

    Parameters
    ----------
    tier : Tier
        Closed by `close`.
    deadline : float
        Seconds for one round trip of at most `batch_bytes`; a bigger page gets more in proportion.
    batch_bytes : int
        Larger calls are made in batches of about this size.
    threads : int
        Calls at a time. If all of them hang, the tier stays down until one returns.
    clock : callable
        Seconds that only grow; for the back-off.
    """

    def __init__(
        self,
        tier: Tier,
        deadline: float = 0.2,
        batch_bytes: int = 4 << 20,
        threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = tier.name
        self._tier = tier
        self._deadline = deadline
        self._batch_bytes = batch_bytes
        self._lanes = Lanes(tier.name, threads)
        self._health = Health(tier.name, clock)
        self._lock = threading.Lock()
        self._counts: dict[str, Counts] = {}
        self._largest: dict[str, int] = {}
        self._closed = False

    @property
    def is_down(self) -> bool:
        """Whether calls raise at once."""
        return self._health.is_down

    @property
    def hung(self) -> int:
        """Calls that have been given up on and have not returned yet."""
        return self._lanes.hung

    def counts(self) -> dict[str, Counts]:
        """Return the counters by method: a copy."""
        with self._lock:
            return {method: replace(counts) for method, counts in self._counts.items()}

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        """See `Tier`."""
        return [
            found
            for some in by_count(keys, _KEYS)
            for found in self._call("contains", partial(self._tier.contains, some))
        ]

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        """See `Tier`."""
        return [
            key for some in by_count(hints, _KEYS) for key in self._call("resolve", partial(self._tier.resolve, some))
        ]

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """See `Tier`. The deadline is for each page; time between them, which is the caller's, does not count."""
        at = 0
        while at < len(keys):
            # Sizes are not known beforehand: the largest page so far tells how many make a batch.
            largest = self._largest.get(part, self._batch_bytes)
            group = keys[at : at + max(1, min(_KEYS, self._batch_bytes // largest))]
            yield from self._get(group, part)
            at += len(group)

    def put(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`. Where it raises, the batches before are stored."""
        self._write("put", self._tier.put, pages)

    def replace(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`. Where it raises, the batches before are stored."""
        self._write("replace", self._tier.replace, pages)

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        """See `Tier`."""
        for some in by_count(keys, _KEYS):
            self._call("drop", partial(self._tier.drop, some, part))

    def usage(self) -> Usage:
        """See `Tier`."""
        return self._call("usage", self._tier.usage)

    def close(self) -> None:
        """See `Tier`. Returns after 5 seconds though calls may still hang."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # Not on a lane: those may all hang.
        own = Lanes(self.name, 1)
        try:
            own.take(CLOSE_SECONDS).run(self._tier.close, CLOSE_SECONDS)
        except Overdue:
            _log.warning("%s does not close: it is left as it is.", self.name)
        except Exception as error:
            _log.warning("%s did not close properly: %s", self.name, _reason(error))
        own.close()
        self._lanes.close()

    def _write(self, method: str, write: Callable[[Sequence[TierPage]], None], pages: Sequence[TierPage]) -> None:
        for batch in by_bytes(pages, self._batch_bytes):
            nbytes = sum(page.nbytes for page in batch)
            self._call(method, partial(write, batch), nbytes)
            self._count(method, nbytes=nbytes)
            for page in batch:
                for part, buffers in page.parts.items():
                    self._note(part, sum(memoryview(buffer).nbytes for buffer in buffers))

    def _call(self, method: str, call: Callable[[], T], nbytes: int = 0) -> T:
        lane, trial = self._enter(method)
        try:
            return self._run(method, lane, trial, call, nbytes)
        finally:
            lane.free()

    def _get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        lane, trial = self._enter("get")
        views: Iterator[memoryview | None] | None = None

        def step() -> memoryview | None:
            nonlocal views
            if views is None:
                views = self._tier.get(keys, part)
            return _next(views)

        def end() -> None:
            _close(views)

        try:
            for i in range(len(keys)):
                # A tier may fetch them all before it yields the first.
                expected = self._largest.get(part, 0) * (len(keys) if i == 0 else 1)
                view = self._run("get", lane, trial, step, expected, calls=int(i == 0), late=end)
                if view is not None:
                    self._count("get", nbytes=view.nbytes)
                    self._note(part, view.nbytes)
                yield view
                del view
        finally:
            if not lane.given_up:
                # What was asked for has been read, or its error raised already: nothing to tell.
                with contextlib.suppress(Exception):
                    lane.run(end, self._deadline)
            lane.free()

    def _enter(self, method: str) -> tuple[Lane, int]:
        """Return a lane, and the trial that the health counts the call under."""
        try:
            if self._closed:
                raise TierError(f"{self.name} has been closed.")
            trial = self._health.admit(stuck=self._lanes.hung >= self._lanes.count)
            return self._lanes.take(self._deadline), trial
        except Overdue:
            self._count(method, refused=1)
            # It need not be the tier's fault that others are before us.
            raise TierError(f"{self.name} is busy: {self._lanes.count} calls are under way.") from None
        except TierError:
            self._count(method, refused=1)
            raise

    def _run(
        self,
        method: str,
        lane: Lane,
        trial: int,
        call: Callable[[], T],
        nbytes: int = 0,
        calls: int = 1,
        late: Callable[[], None] | None = None,
    ) -> T:
        seconds = self._deadline * max(1, math.ceil(nbytes / self._batch_bytes))
        began = time.monotonic()
        try:
            result = lane.run(call, seconds, late)
        except Overdue:
            self._count(method, calls=calls, failures=1, timeouts=1, seconds=time.monotonic() - began)
            reason = f"no answer within {seconds:g} s"
            self._health.failed(trial, reason)
            raise TierError(f"{self.name} does not answer: {reason}.") from None
        except TierFullError:
            # It is well: reads go on.
            self._count(method, calls=calls, failures=1, seconds=time.monotonic() - began)
            self._health.succeeded(trial)
            raise
        except Exception as error:
            self._count(method, calls=calls, failures=1, seconds=time.monotonic() - began)
            self._health.failed(trial, _reason(error))
            if isinstance(error, TierError):
                raise
            raise TierError(f"{self.name} failed: {_reason(error)}") from error
        self._count(method, calls=calls, seconds=time.monotonic() - began)
        self._health.succeeded(trial)
        return result

    def _note(self, part: str, nbytes: int) -> None:
        self._largest[part] = max(self._largest.get(part, 1), nbytes)

    def _count(self, method: str, **more: float) -> None:
        with self._lock:
            counts = self._counts.setdefault(method, Counts())
            for name, number in more.items():
                setattr(counts, name, getattr(counts, name) + number)


def _next(views: Iterator[memoryview | None]) -> memoryview | None:
    view = next(cast("Iterator[object]", views), _END)
    if view is _END:
        raise TierError("The tier returned fewer pages than it was asked for.")
    return cast("memoryview | None", view)


def _close(views: Iterator[memoryview | None] | None) -> None:
    close = getattr(views, "close", None)
    if close is not None:
        close()


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
