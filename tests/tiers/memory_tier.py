"""A tier in a dictionary: what the protocol means, in as few lines as it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock

from tailreplay.tiers.base import Found, TierError, TierPage, Usage
from tailreplay.tiers.merging import merge


@dataclass
class Stored:
    """A page: what `TierPage` says, with each part in one piece."""

    header: bytes
    tenant: bytes
    parts: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(map(len, self.parts.values()))


class MemoryTier:
    """Pages in host memory, least recently used first.

    Parameters
    ----------
    limit_bytes : int
        Headers and parts together.
    before : callable
        Called with the name of each method before it does anything; may raise `TierError`, or wait.
    """

    name = "memory"

    def __init__(self, limit_bytes: int, before: Callable[[str], None] = lambda method: None) -> None:
        self.limit, self.before = limit_bytes, before
        self.pages: dict[bytes, Stored] = {}
        self.hints: dict[bytes, bytes] = {}
        self.evictions, self.closed = 0, False
        self._lock = RLock()

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        with self._doing("contains"):
            pages = [self.pages.get(key) for key in keys]
            return [page and Found(page.header, frozenset(page.parts)) for page in pages]

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        with self._doing("resolve"):
            return [self.hints.get(hint) for hint in hints]

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        for key in keys:
            with self._doing("get"):
                page = self.pages.get(key)
                if page is not None:
                    self.pages[key] = self.pages.pop(key)
                value = page.parts.get(part) if page else None
            yield None if value is None else memoryview(value)

    def put(self, pages: Sequence[TierPage]) -> None:
        self._put(pages, over=False)

    def replace(self, pages: Sequence[TierPage]) -> None:
        self._put(pages, over=True)

    def _put(self, pages: Sequence[TierPage], over: bool) -> None:
        with self._doing("put"):
            for page in pages:
                if page.nbytes > self.limit:
                    raise TierError("The page is larger than the limit.")
                old = None if over else self.pages.get(page.key)
                change = merge(old and Found(old.header, frozenset(old.parts)), page)
                new = Stored(old.header, old.tenant, dict(old.parts)) if old else Stored(page.header, page.tenant)
                if change is not None:
                    new.header = change.header
                    new.parts = {name: data for name, data in new.parts.items() if name not in change.drop}
                    new.parts |= {name: b"".join(data) for name, data in change.parts.items()}
                self.pages.pop(page.key, None)
                self._make_room(new.nbytes)
                self.pages[page.key] = new
                self.hints |= dict.fromkeys(page.hints, page.key)

    def _make_room(self, nbytes: int) -> None:
        while self.pages and sum(page.nbytes for page in self.pages.values()) + nbytes > self.limit:
            del self.pages[next(iter(self.pages))]
            self.evictions += 1

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        with self._doing("drop"):
            for key in keys:
                page = self.pages.get(key)
                if page is not None and part is not None:
                    page.parts.pop(part, None)
                if page is not None and (part is None or not page.parts):
                    del self.pages[key]

    def usage(self) -> Usage:
        with self._doing("usage"):
            tenants: Counter[bytes] = Counter()
            for page in self.pages.values():
                tenants[page.tenant] += page.nbytes
            return Usage(sum(tenants.values()), self.limit, len(self.pages), self.evictions, dict(tenants))

    def close(self) -> None:
        self.closed = True

    def _doing(self, method: str) -> RLock:
        if self.closed:
            raise TierError("The tier is closed.")
        self.before(method)
        return self._lock
