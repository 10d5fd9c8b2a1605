"""A tier that does as it is told, something to hang on, and a clock that tests set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from tailreplay.tiers.base import Found, TierPage, Usage

LONG = 30.0


class Fake:
    """A tier that does as it is told: `before` runs first in every call, `item` before every page of `get`."""

    name = "fake"

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None
        self.item: Callable[[], None] = lambda: None
        self.seen: list[str] = []
        self.batches: list[int] = []
        self.value = b"x" * 100
        self.ended = threading.Event()

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        self._called("contains", keys)
        return [None for _ in keys]

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        self._called("resolve", hints)
        return list(hints)

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        self._called("get", keys)
        try:
            for _ in keys:
                self.item()
                yield memoryview(self.value)
        finally:
            self.ended.set()

    def put(self, pages: Sequence[TierPage]) -> None:
        self._called("put", pages)

    def replace(self, pages: Sequence[TierPage]) -> None:
        self._called("replace", pages)

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        self._called("drop", keys)

    def usage(self) -> Usage:
        self._called("usage", ())
        return Usage(1, 2, 3)

    def close(self) -> None:
        self._called("close", ())

    def _called(self, method: str, batch: Sequence[object]) -> None:
        self.seen.append(method)
        self.batches.append(len(batch))
        self.before()


class Hang:
    """Something to wait for: `entered` tells that a call is in it, `release` lets all go."""

    def __init__(self) -> None:
        self.entered, self._go = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.entered.release()
        assert self._go.wait(LONG)

    def release(self) -> None:
        self._go.set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
