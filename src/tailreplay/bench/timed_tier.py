"""A tier that notes how long it takes, and which pages it was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tailreplay.tiers.base import Found, Tier, TierPage, Usage


class TimedTier:
    """Passes every call on to a tier.

    Parameters
    ----------
    make : callable
        Opens the tier.

    Attributes
    ----------
    keys : list of bytes
        Of the pages that were put, in order.
    """

    def __init__(self, make: Callable[[], Tier]) -> None:
        self._make = make
        self._tier = make()
        self.name = self._tier.name
        self.keys: list[bytes] = []
        self.reset()

    def reopen(self, between: Callable[[], object]) -> None:
        """Close the tier, call `between`, and open it again. Nobody may use it meanwhile."""
        self._tier.close()
        between()
        self._tier = self._make()

    def reset(self) -> None:
        """Begin anew with the times."""
        self._finding = self._getting = 0.0
        self._nbytes = 0

    def taken(self) -> tuple[float, float, int]:
        """Return the seconds spent on saying what is there, those on handing it over, and the bytes handed over."""
        return self._finding, self._getting, self._nbytes

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        """See `Tier`."""
        with self._find():
            return self._tier.contains(keys)

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        """See `Tier`."""
        with self._find():
            return self._tier.resolve(hints)

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """See `Tier`. What the caller does between two views does not count."""
        begin = time.perf_counter()
        for view in self._tier.get(keys, part):
            self._getting += time.perf_counter() - begin
            self._nbytes += view.nbytes if view is not None else 0
            yield view
            del view
            begin = time.perf_counter()

    def put(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`."""
        self._tier.put(pages)
        self.keys += [page.key for page in pages]

    def replace(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`."""
        self._tier.replace(pages)

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        """See `Tier`."""
        self._tier.drop(keys, part)

    def usage(self) -> Usage:
        """See `Tier`."""
        return self._tier.usage()

    def close(self) -> None:
        """See `Tier`."""
        self._tier.close()

    @contextmanager
    def _find(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._finding += time.perf_counter() - begin
