"""Whether a tier is worth asking: down after a failure, tried again after a back-off that doubles."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tailreplay.tiers.base import TierError

FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
_log = logging.getLogger("tailreplay.tiers")


class Health:
    """Up, or down until a time. Thread-safe; says so in the log when that changes, and only then.

    Parameters
    ----------
    name : str
        Of the tier.
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._since = self._until = 0.0
        self._backoff = 0.0
        self._trial = 0

    @property
    def is_down(self) -> bool:
        """Whether it failed last."""
        return self._reason is not None

    def admit(self, stuck: bool = False) -> int:
        """Let a call through, and return the number that its outcome is reported with.

        While it is down one call is let through when the back-off is over; the others wait for its outcome, or for the next
        back-off. None is while it is `stuck`.

        Raises
        ------
        TierError
            At once, if it is down.
        """
        with self._lock:
            if self._reason is not None:
                now = self._clock()
                if stuck or now < self._until:
                    raise TierError(f"{self._name} is down ({self._reason.rstrip('.')}) and is left alone for a while.")
                self._until = now + self._backoff
            return self._trial

    def failed(self, trial: int, reason: str) -> None:
        """Report a failure. One of a call that began before the last failure changes nothing."""
        with self._lock:
            if trial != self._trial:
                return
            fell = self._reason is None
            now = self._clock()
            if fell:
                self._since = now
            self._backoff = FIRST_SECONDS if fell else min(2 * self._backoff, MOST_SECONDS)
            self._reason, self._until = reason, now + self._backoff
            self._trial += 1
        if fell:
            _log.warning("%s is down, and requests go on without it: %s", self._name, reason)

    def succeeded(self, trial: int) -> None:
        """Report a success. One of a call that began before the last failure proves nothing."""
        if self._reason is None:
            return
        with self._lock:
            if trial != self._trial or self._reason is None:
                return
            self._reason = None
            seconds = self._clock() - self._since
        _log.warning("%s is back after %.0f s.", self._name, seconds)
