"""The children of one page, searchable by longest common prefix."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Protocol, TypeVar

from tailreplay.keys import TOKEN_BYTES, common_tokens


class HasIds(Protocol):
    """Anything with encoded token ids (see `tailreplay.keys.token_bytes`)."""

    @property
    def ids(self) -> bytes: ...


T = TypeVar("T", bound=HasIds)


class Siblings(list[T]):
    """Pages with one parent, sorted by token ids.

    In sorted order, the page with the longest common prefix with any query is next to where the query would stand, so a
    search among thousands of branches compares two pages.
    """

    def add(self, page: T) -> None:
        """Insert `page` at its place."""
        self.insert(self._position(page.ids), page)

    def discard(self, page: T) -> None:
        """Take `page` out; it must be there."""
        at = self._position(page.ids)
        while self[at] is not page:
            at += 1
        del self[at]

    def same(self, ids: bytes) -> T | None:
        """Return the page of just these tokens, if it is here."""
        at = self._position(ids)
        return self[at] if at < len(self) and self[at].ids == ids else None

    def holds(self, ids: bytes) -> bool:
        """Whether some page begins with `ids`."""
        at = self._position(ids)
        return at < len(self) and self[at].ids.startswith(ids)

    def longest(self, ids: bytes) -> tuple[T | None, int]:
        """Return the page that shares most leading tokens with `ids`, and how many; (None, 0) if none does."""
        best: T | None = None
        length = 0
        for page in self._neighbours(ids):
            common = common_tokens(page.ids, ids)
            if common > length:
                best, length = page, common
        return best, length

    def prefixes_of(self, ids: bytes) -> list[T]:
        """Return the pages whose tokens are a proper prefix of `ids`, longest first."""
        found: list[T] = []
        at = self._position(ids)
        while at:
            page = self[at - 1]
            # Whatever else is a prefix of `ids` sorts before `page`, so it is one of what both share.
            ids = ids[: common_tokens(page.ids, ids) * TOKEN_BYTES]
            if page.ids == ids:
                found.append(page)
                at -= 1
            else:
                at = self._position_after(ids)
        return found

    def continuing(self, ids: bytes) -> Iterator[T]:
        """Yield the pages whose tokens begin with `ids` and go on."""
        at = self._position_after(ids)
        while at < len(self) and self[at].ids.startswith(ids):
            yield self[at]
            at += 1

    def _position(self, ids: bytes) -> int:
        return bisect_left(self, ids, key=lambda page: page.ids)

    def _position_after(self, ids: bytes) -> int:
        return bisect_right(self, ids, key=lambda page: page.ids)

    def _neighbours(self, ids: bytes) -> Iterator[T]:
        at = self._position(ids)
        if at < len(self):
            yield self[at]
        if at:
            yield self[at - 1]
